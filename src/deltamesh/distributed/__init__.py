"""Everything that talks to other processes: collectives, agreement between ranks, meshes and the launcher."""
