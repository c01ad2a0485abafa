"""The whole daemon, talking to a double of the server that checks every event it gets."""

from __future__ import annotations

from pathlib import Path

from edge_daemon_rig import configure, edge_section, enrolled, running
from edge_server_double import EdgeServerDouble, edge_server, until

from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb


async def test_it_says_hello_and_every_event_is_signed_for_in_full(
    server: EdgeServerDouble, tmp_path: Path
) -> None:
    state = await enrolled(tmp_path / "state", server)
    configure(state, {"spec": {"cluster": {"heartbeat_interval_secs": 1}}})
    configure(state, edge_section(capabilities={"custom_labels": {"rack": "7"}}))
    async with running(state):
        await until(lambda: server.beats)
        found = await server.outcome("cmd.run", {"command": "echo", "args": ["hello"]})
    assert (found.outcome, found.exit_code, found.stdout) == ("ok", 0, b"hello\n")
    assert server.complaints == []
    said = pb.EdgeCapabilities.FromString(server.hellos[0].capabilities)
    assert said.custom_labels["rack"] == "7"
    assert "shell" in said.local_tools
    assert "cmd.run" in said.local_tools
    assert server.metadata[0]["x-aegis-edge-dialect"] == "seed"
    assert server.metadata[0]["authorization"].startswith("Bearer ")


async def test_the_same_over_tls(tmp_path: Path) -> None:
    async with edge_server(tmp_path / "server", tls=True) as server:
        state = await enrolled(tmp_path / "state", server)
        async with running(state, authority=server.authority):
            await until(lambda: server.hellos)
            found = await server.outcome("cmd.run", {"command": "true"})
    assert found.outcome == "ok"
