"""Encoding: what a block costs the sender, and our columns against one JSON object per step."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.figures import Figure, Findings, Ratio, all_of, in_turn
from bench.games import CART, cart_obs, record
from bench.sizes import Scale
from understudy.client.spool import Spool
from understudy.client.spool_folder import SpooledFrame
from understudy.core.names import new_session, player_name
from understudy.experience.builder import ChunkBuilder, encode_block
from understudy.experience.chunk import Chunk, RowKind, decode_chunk


def measure(folder: Path, scale: Scale) -> Findings:
    """Measure blocks written to the spool, and one chunk encoded and decoded by both codecs."""
    findings = Findings()
    for steps, goal in ((512, 1e6), (64, None)):
        n_blocks = max(2, scale.chunks // 4 if steps == 512 else scale.short_chunks // 4)
        rounds = [
            _spool(folder / f"{steps}-{at}", steps=steps, n_blocks=n_blocks)
            for at in range(scale.rounds)
        ]
        gate = all_of(
            ("spool read back bit-equal, every step once", all(is_same for _, is_same in rounds))
        )
        findings.figures.append(
            Figure(
                name=f"encode + spool, {steps}-step chunks",
                unit="steps/s/core",
                values=[steps_s for steps_s, _ in rounds],
                goal=goal,
                gate=gate,
                bound_by="Python per column and chunk; the page cache write",
            )
        )
    _beside_json(findings, scale)
    return findings


def _spool(folder: Path, *, steps: int, n_blocks: int) -> tuple[float, bool]:
    """Steps encoded and spooled per CPU second, and whether all of them can be read back."""
    session = new_session(time.time())
    builder = ChunkBuilder(CART, session=session, max_steps=steps, client="bench")
    spools = Spool(folder)
    spool = spools.create(session, player=player_name("bench"), spec=CART)
    entries: list[SpooledFrame] = []
    bodies: list[bytes] = []
    cpu_s = 0.0
    clock = time.thread_time
    for _ in record(builder, cart_obs(n_blocks * (steps + steps // 64 + 4))):
        began = clock()
        block = builder.take()
        assert block is not None
        for encoded in encode_block(block, chunk_no=spool.next_no, first_step=spool.n_steps):
            assert encoded.frame is not None
            entries.append(spool.add(encoded.frame, encoded.n_steps))
        spools.write()
        cpu_s += clock() - began
        frame = entries[-1].frame
        assert frame is not None
        bodies.append(frame.body)
        entries[-1].frame = None
    is_same = len(entries) == len(bodies) == spool.next_no
    for entry, body in zip(entries, bodies, strict=False):
        read = spool.read(entry)
        is_same &= (
            read is not None
            and read.body == body
            and decode_chunk(body).meta.n_steps == entry.n_steps
        )
    n_steps = spool.n_steps
    spools.remove(spool)
    return n_steps / cpu_s, is_same


def _beside_json(findings: Findings, scale: Scale) -> None:
    chunk = _one_chunk()
    body = chunk.encode()
    records = _records(chunk)
    lines = [json.dumps(row) for row in records]
    is_same = decode_chunk(body) == chunk and [json.loads(line) for line in lines] == records
    gate = all_of(("both codecs return what was encoded", is_same))
    findings.notes.append(
        f"codec: a 512-step chunk has {len(body):,} bytes, as JSON per record "
        f"{sum(map(len, lines)):,}"
    )
    for name, ours, theirs in (
        ("encode", chunk.encode, lambda: [json.dumps(row) for row in records]),
        (
            "decode and check",
            lambda: decode_chunk(body),
            lambda: [json.loads(line) for line in lines],
        ),
    ):
        times = in_turn(
            scale.rounds, {"ours": partial(_us, ours, 40), "json": partial(_us, theirs, 6)}
        )
        findings.ratios.append(
            Ratio(
                name=f"codec, {name}",
                peer="JSON per record",
                unit="µs CPU per chunk",
                ours=times["ours"],
                theirs=times["json"],
                more_is_better=False,
                gate=gate,
            )
        )


def _us(work: Any, times: int) -> float:
    began = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - began) / times * 1e6


def _one_chunk() -> Chunk:
    builder = ChunkBuilder(CART, session=new_session(time.time()), client="bench")
    next(record(builder, cart_obs(600)))
    block = builder.take()
    assert block is not None
    return block.chunk(chunk_no=0, first_step=0).validate()


def _records(chunk: Chunk) -> list[dict[str, Any]]:
    """The same steps as JSON-like records, each with its next observation."""
    columns = {name: column.tolist() for name, column in chunk.columns.items()}
    identity = {"game": chunk.meta.game, "session": str(chunk.meta.session)}
    return [
        {
            **identity,
            "step": number,
            "obs": columns["obs"][at],
            "action": columns["action"][at],
            "reward": columns["reward"][at],
            "next_obs": columns["obs"][at + 1],
            "terminated": columns["terminated"][at],
            "truncated": columns["truncated"][at],
            "by": columns["by"][at],
            "t_ms": columns["t_ms"][at],
        }
        for number, at in enumerate(np.flatnonzero(chunk.columns["row"] == RowKind.STEP).tolist())
    ]
