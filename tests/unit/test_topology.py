"""Topologies: sizes, what fits, and which rank sits where."""

from types import SimpleNamespace

import pytest

from deltamesh.topology import Coordinate, Topology, tensor_parallel_sizes

QWEN3_NEXT = SimpleNamespace(
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    num_attention_heads=16,
    num_key_value_heads=2,
    intermediate_size=5120,
)


def config(**changes: int) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(QWEN3_NEXT), **changes})


def test_cp_groups_of_tp2_cp2_are_strided() -> None:
    assert Topology(tp=2, cp=2).groups("cp") == ((0, 2), (1, 3))
    assert Topology(tp=2, cp=2).groups("tp") == ((0, 1), (2, 3))
    assert Topology(tp=2, cp=4).groups("cp") == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_cp_groups_of_dp2_cp2_are_neighbours() -> None:
    assert Topology(dp=2, cp=2).groups("cp") == ((0, 1), (2, 3))
    assert Topology(dp=2, cp=2).groups("dp") == ((0, 2), (1, 3))


def test_every_group_of_dp2_cp2_tp2() -> None:
    topology = Topology(dp=2, cp=2, tp=2)
    assert topology.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert topology.groups("cp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert topology.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert topology.groups("dp", "cp") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert topology.groups("cp", "tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert topology.groups("dp", "cp", "tp") == (tuple(range(8)),)


def test_missing_axis_is_a_group_of_one_and_never_the_world() -> None:
    assert Topology(cp=4).groups("tp") == ((0,), (1,), (2,), (3,))
    assert Topology(tp=3).groups("dp", "cp") == ((0,), (1,), (2,))


def test_groups_order_members_by_their_index_on_the_axis() -> None:
    topology = Topology(dp=2, cp=3, tp=5)
    for group in topology.groups("cp"):
        assert [topology.coordinate(rank).cp for rank in group] == [0, 1, 2]
    for group in topology.groups("dp", "cp"):
        places = [topology.coordinate(rank) for rank in group]
        assert [place.dp * 3 + place.cp for place in places] == list(range(6))


def test_rank_and_coordinate_are_inverse_with_tp_fastest() -> None:
    topology = Topology(dp=2, cp=3, tp=5)
    for rank in range(topology.world_size):
        place = topology.coordinate(rank)
        assert rank == (place.dp * 3 + place.cp) * 5 + place.tp
        assert topology.rank(place) == rank


def test_coordinate_outside_the_topology_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 4 is not in dp=1 cp=2 tp=2; its ranks are 0\.\.3"):
        Topology(cp=2, tp=2).coordinate(4)
    with pytest.raises(ValueError, match=r"rank -1 is not in"):
        Topology(cp=2, tp=2).coordinate(-1)
    with pytest.raises(ValueError, match=r"cp index 2 is not in dp=1 cp=2 tp=2; use 0\.\.1"):
        Topology(cp=2, tp=2).rank(Coordinate(dp=0, cp=2, tp=0))


def test_sequence_parallelism_is_on_exactly_when_tp_exceeds_one() -> None:
    assert Topology(tp=2).sp is True
    assert Topology(cp=4).sp is False
    assert Topology(tp=2, sp=False).sp is False
    assert Topology(tp=2, sp=False) != Topology(tp=2)
    assert str(Topology(tp=2, sp=False)) == "dp=1 cp=1 tp=2 sp=False"


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True, None])
def test_size_that_is_no_positive_integer_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match=r"cp=.* is not a positive integer"):
        Topology(cp=size)  # type: ignore[arg-type]


def test_topology_is_frozen_and_keyword_only() -> None:
    with pytest.raises(AttributeError):
        Topology(tp=2).tp = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        Topology(2)  # type: ignore[misc]


def test_missing_dp_is_what_the_world_leaves() -> None:
    assert Topology.resolve(8, tp=2, cp=2) == Topology(dp=2, cp=2, tp=2)
    assert Topology.resolve(8) == Topology(dp=8)


def test_sizes_that_do_not_make_up_the_world_list_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"cp=1 x tp=4 = 4 does not divide the world size 6.*\(dp=3 cp=2 tp=1\)"):
        Topology.resolve(6, tp=4)
    with pytest.raises(ValueError, match=r"dp=3 cp=1 tp=1 needs 3 ranks, but the world has 2; .*\(dp=1 cp=2 tp=1\)"):
        Topology.resolve(2, dp=3)
    with pytest.raises(ValueError, match="and 3 more"):
        Topology().check_world(16)


def test_environment_gives_sizes_and_arguments_win() -> None:
    environ = {
        "DELTAMESH_DATA_PARALLEL_SIZE": "3",
        "DELTAMESH_CONTEXT_PARALLEL_SIZE": "2",
        "DELTAMESH_TENSOR_PARALLEL_SIZE": " 4 ",
    }
    assert Topology.from_env(environ=environ) == Topology(dp=3, cp=2, tp=4)
    assert Topology.from_env(environ=environ, tp=1, dp=5) == Topology(dp=5, cp=2, tp=1)
    assert Topology.from_env(environ={}) == Topology()
    assert Topology.from_env(environ={"DELTAMESH_TENSOR_PARALLEL_SIZE": ""}) == Topology()


def test_environment_without_dp_is_completed_by_the_world_size() -> None:
    environ = {"DELTAMESH_TENSOR_PARALLEL_SIZE": "2"}
    assert Topology.from_env(environ=environ, world_size=6) == Topology(dp=3, tp=2)
    with pytest.raises(ValueError, match="dp=1 cp=1 tp=2 needs 2 ranks, but the world has 6"):
        Topology.from_env(environ=environ, world_size=6, dp=1)


def test_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAMESH_CONTEXT_PARALLEL_SIZE", "7")
    assert Topology.from_env().cp == 7


@pytest.mark.parametrize("text", ["two", "-2", "0", "1.5"])
def test_malformed_variable_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ValueError, match="DELTAMESH_CONTEXT_PARALLEL_SIZE=.* is not a positive integer"):
        Topology.from_env(environ={"DELTAMESH_CONTEXT_PARALLEL_SIZE": text})


def test_variable_overruled_by_an_argument_is_not_read() -> None:
    assert Topology.from_env(environ={"DELTAMESH_TENSOR_PARALLEL_SIZE": "two"}, tp=2) == Topology(tp=2)


def test_tp_that_does_not_divide_the_key_heads_says_which_sizes_do() -> None:
    with pytest.raises(ValueError) as error:
        Topology(tp=3).check_model(QWEN3_NEXT)
    assert str(error.value) == "tp=3 does not divide linear_num_key_heads=16; use tp in {1, 2, 4, 8, 16}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("linear_num_value_heads", 36), ("num_attention_heads", 12), ("intermediate_size", 2052)],
)
def test_tp_has_to_divide_every_sharded_size(name: str, value: int) -> None:
    changed = config(**{name: value})
    Topology(tp=4).check_model(changed)
    with pytest.raises(ValueError, match=rf"tp=8 does not divide {name}={value}; use tp in {{1, 2, 4}}"):
        Topology(tp=8).check_model(changed)


def test_tp_may_exceed_the_kv_heads_by_a_whole_factor() -> None:
    for tp in (1, 2, 4, 8, 16):
        Topology(tp=tp).check_model(QWEN3_NEXT)
    three = config(linear_num_key_heads=12, linear_num_value_heads=12, num_attention_heads=12, num_key_value_heads=3)
    for tp in (1, 3, 6, 12):
        Topology(tp=tp).check_model(config(**{**vars(three), "intermediate_size": 120}))
    with pytest.raises(
        ValueError, match=r"tp=2 neither divides num_key_value_heads=3 nor is a multiple of it; use tp in"
    ):
        Topology(tp=2).check_model(three)


def test_suggested_sizes_fit_all_parts_of_the_model_at_once() -> None:
    assert tensor_parallel_sizes(config(num_attention_heads=24, num_key_value_heads=4)) == [1, 2, 4, 8]


def test_dp_and_cp_fit_any_model() -> None:
    Topology(dp=7, cp=11).check_model(QWEN3_NEXT)


def test_fitting_topologies_make_up_the_world_and_fit_the_model() -> None:
    fitting = Topology.fitting(12, config(num_attention_heads=12, num_key_value_heads=4))
    assert {topology.tp for topology in fitting} == {1, 2, 4}
    assert all(topology.world_size == 12 for topology in fitting)
    assert len(set(fitting)) == len(fitting) == 6 + 4 + 2
    with pytest.raises(ValueError, match=r"topologies of 5 ranks: \(dp=5 cp=1 tp=1\), \(dp=1 cp=5 tp=1\)$"):
        Topology(tp=2).check_world(5, QWEN3_NEXT)
