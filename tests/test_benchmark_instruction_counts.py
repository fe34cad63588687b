"""Loops and kinds of instructions are read from what the disassembler writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.gpu.compiling import innermost_loops, read_sass
from benchmarks.instruction_counts import as_table, kind_of

# A loop of 0x20 to 0x60 within one of 0x10 to 0x80, and the end's branch to itself.
SASS = """
        /*0000*/                   S2R R1, SR_TID.X ;                        /* 0x0000000000017919 */
                                                                             /* 0x000e220000002100 */
        /*0010*/                   MOV R2, RZ ;                              /* 0x000000ff00027202 */
        /*0020*/                   LDSM.16.M88.4 R4, [R1] ;                  /* 0x000000000104783b */
        /*0030*/                   F2FP.F16.E4M3.UNPACK_B R8, R4.H1 ;        /* 0x00000004ff08723e */
        /*0040*/                   HMMA.16816.F32 R12, R4, R8, R12 ;         /* 0x00000008040c723c */
        /*0050*/              @!P1 IADD3 R2, R2, 0x1, RZ ;                   /* 0x0000000102029810 */
        /*0060*/               @P0 BRA 0x20 ;                                /* 0x0000000000000947 */
        /*0070*/                   F2F.BF16.F32 R3, R12 ;                    /* 0x0000000c00037304 */
        /*0080*/            @!UP0 BRA.U 0x10 ;                               /* 0x0000000000000947 */
        /*0090*/                   BRA 0x90 ;                                /* 0x0000000000000947 */
"""


def test_the_inner_loop_is_found_and_its_instructions_by_kind() -> None:
    (loop,) = innermost_loops(read_sass(SASS))
    assert [each.address for each in loop] == [0x20, 0x30, 0x40, 0x50, 0x60]
    assert Counter(map(kind_of, loop)) == {"shared": 1, "pair conversion": 1, "matrix": 1, "integer": 1, "other": 1}


def test_what_a_branch_waits_for_is_no_target() -> None:
    branch = "/*0020*/ @!UP0 BRA.U 0x10    &req={3,0}    ?trans7 ; /* 0x0947 */\n"
    (loop,) = innermost_loops(read_sass("/*0010*/ MOV R2, RZ ?trans1 ; /* 0x7202 */\n" + branch))
    assert [each.operands for each in loop] == ["R2, RZ", "0x10"]


def test_a_row_of_the_table_has_a_cell_for_every_column() -> None:
    usage = {"warps": 4, "registers": 100, "stack": 0, "shared": 1024}
    row = {"case": "a case", "instructions": 42, "per_weight": 0.5, "kinds": {"matrix": 42}, **usage}
    table = as_table([row], "title")
    assert [next(iter(column.cells)) for column in table.columns][:3] == ["a case", "42", "0.50"]


@pytest.mark.gpu_compile
def test_loops_of_compiled_kernels_are_found() -> None:
    """The decode kernel's loop multiplies matrices, in the same number of instructions for any cache."""
    command = [sys.executable, "-m", "benchmarks.instruction_counts", "--json", "--only", "decode"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=environment)
    rows = {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert len({row["kinds"]["matrix"] for row in rows.values()}) == 1
    assert sum(rows["attention, bf16, decode"]["kinds"].values()) == rows["attention, bf16, decode"]["instructions"]
