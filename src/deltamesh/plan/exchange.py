"""Row exchanges: which rows of its slice a rank sends to which peer, and how many it receives from each.

An exchange is planned once per micro-batch on every rank and used by every layer. Peers are named by their index
inside the group, never by a global rank.
"""

from dataclasses import dataclass

import numpy as np

from deltamesh.plan.pieces import Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class RowExchange:
    """One rank's part of an all-to-all of rows.

    Attributes:
        send_rows: int64 [sum(send_splits)], rows of this slice in the order of the receiving peer; the rows for one
            peer are unique (a row may go to several peers).
        send_splits: rows sent to each peer, by group-local index.
        recv_splits: rows received from each peer; received rows are in the order of the sending peer.
    """

    send_rows: Ints
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]

    @property
    def num_received(self) -> int:
        """Rows that arrive."""
        return sum(self.recv_splits)


def plan_row_exchanges(needs: list[Ints], cuts: Ints) -> list[RowExchange]:
    """Turns what each rank needs into what each rank sends.

    Args:
        needs: per rank, ascending unique stream rows outside its own slice that it needs.
        cuts: int64 [P + 1], slice r owns rows cuts[r] .. cuts[r + 1].

    Returns:
        One exchange per rank. Rank r receives exactly the rows needs[r], ascending.

    Example:
        >>> a, b = plan_row_exchanges([np.array([], dtype=np.int64), np.array([1])], np.array([0, 2, 3]))
        >>> a.send_rows.tolist(), a.send_splits, b.recv_splits
        ([1], (0, 1), (1, 0))
    """
    ranks = len(needs)
    bounds = [np.searchsorted(need, cuts) for need in needs]  # owner o supplies need[bounds[o] : bounds[o + 1]]
    exchanges = []
    for me in range(ranks):
        parts = [needs[peer][bounds[peer][me] : bounds[peer][me + 1]] - cuts[me] for peer in range(ranks)]
        exchanges.append(
            RowExchange(
                send_rows=np.concatenate(parts).astype(np.int64),
                send_splits=tuple(len(part) for part in parts),
                recv_splits=tuple(int(n) for n in np.diff(bounds[me])),
            )
        )
    return exchanges
