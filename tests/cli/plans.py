#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""`unshard plan --binary`: a second reader puts tensors together by it and finds the framework's own bytes."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from commands import DATA, DCP, SOURCE, USAGE, Cli, expected  # noqa: E402
from mountlib import main, make_tensors, same, sha256, write_checkpoint  # noqa: E402
from planlib import Plan  # noqa: E402


def plan_of(cli, source, key, *options):
    return Plan(cli.run("plan", source, key, "--binary", *options, text=False).stdout)


def check_fixture(t, name, through=()):
    """All tensors: those of pieces by their plans, those that must be decoded only say so."""
    cli, source = Cli(t), os.path.join(DATA, name)
    for key, want in expected(source).items():
        plan = plan_of(cli, source, key)
        same(f"{name} {key}", (plan.key, plan.dtype, plan.shape), (key, want["dtype"], want["shape"]))
        same(f"{key}: through the mount", plan.through, through is all or key in through)
        if not plan.through:
            same(f"{key}: bytes", sha256(plan.assemble()), want["sha256"])


def test_dcp(t):
    check_fixture(t, "torch_dcp/dcp_fsdp2_adamw_2r")


def test_strided_conjugated_negated(t):
    check_fixture(t, "torch_dcp/dcp_layouts")


def test_cuts_of_two_dimensions(t):
    check_fixture(t, "torch_dcp/dcp_fsdp_tp_strided_2x2")


def test_every_type(t):
    check_fixture(t, "safetensors/hf_safetensors_dtypes")


def test_big_endian(t):
    check_fixture(t, "torch_file/pt_zip_big_endian")


def test_compressed_pieces_are_read_through_the_mount(t):
    check_fixture(t, "torch_dcp/dcp_zstd_2r", through=all)


def test_members_of_an_archive_are_read_through_the_mount(t):
    check_fixture(t, "nemo/nemo_plain", through=all)


def test_a_cast(t):
    plan = plan_of(Cli(t), DCP, "model.emb.weight", "-o", "dtype=bf16")
    same("types", (plan.dtype, plan.stored), ("BF16", "F32"))
    same("stored bytes", sha256(plan.assemble()), expected(DCP)["model.emb.weight"]["sha256"])
    same("bytes", plan.bytes, 2 * plan.shape[0] * plan.shape[1])


def test_one_file(t):
    os.mkdir(t + "/c")
    write_checkpoint(t + "/c", make_tensors(3))
    name = next(n for n in os.listdir(t + "/c") if n.endswith(".safetensors"))
    key = Cli(t).json("ls", f"{t}/c/{name}")["tensors"][0]["key"]
    plan = plan_of(Cli(t), f"{t}/c/{name}", key)
    same("source", plan.sources[0][0], os.path.realpath(f"{t}/c/{name}"))
    same("bytes", plan.assemble(), Cli(t).run("cat", t + "/c", key, text=False).stdout)


def test_refusals(t):
    cli = Cli(t)
    cli.error("plan", DCP, "nowhere", "--binary", status=SOURCE, words=["no tensor nowhere"])
    cli.error("ls", DCP, "--binary", status=USAGE, words=["takes no --binary"])


if __name__ == "__main__":
    main(globals())
