"""What is made of published measurements, and of trials on this machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.predict.cluster import bundled_cluster
from autotune.predict.constants import FITTED
from autotune.predict.decoder import Decoder, decoder_profile
from autotune.predict.parallel import ALONE, Parallel
from autotune.search.plan import RESERVED_SHARE
from benchmarks import machine, replay
from benchmarks.predict import constant_utilisation, correlation, fit, fsdp_rows, megatron_rows, missed
from benchmarks.replay import Group, Run
from engine.config import TrainConfig
from engine.report import Outcome
from tests.support.samples import sample_failure, sample_prediction, sample_report

MEGATRON = """# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,\
data parallelism,pipeline parallelism,iteration time (ms)
4,16,4,2048,16,24,1024,1,2,2,500.0
4,16,2,2048,16,24,1024,2,2,1,250.0
2,16,8,1024,16,24,1024,1,1,2,750.0
"""

MPT = """section,Model,SeqLen (T),# GPUs,GPU,MicroBatchSize,GradAccum,Throughput (T/s),GlobalBatchSize (T),Precision,\
Activation Checkpointing
A100 40GB with 800 Gbps node-node interconnect (RoCE),1b,2048,16,a100_40gb,8,2,262144,524288,amp_bf16,True
H100 80GB with 3200 Gbps node-node interconnect (RoCE),1b,2048,8,h100_80gb,8,2,262144,262144,amp_fp8,False
"""


def run(name: str = "small", *, layers: int = 4, micro: int = 8, seconds: float = 1.0) -> Run:
    decoder = Decoder(layers=layers, hidden=1024, heads=16, vocab=50_304, sequence_length=1024)
    return Run(name=name, model=decoder_profile(decoder), hardware=bundled_cluster("a100-80gb").hardware(8),
               config=TrainConfig.model_validate({"zero_stage": 3, "precision": "bf16", "micro_batch_size": micro}),
               parallel=ALONE, measured_seconds=seconds)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vtrain_some.csv").write_text(MEGATRON)
    (tmp_path / "mpt_some.csv").write_text(MPT)
    monkeypatch.setenv("AUTOTUNE_REPLAY_DIR", str(tmp_path))


@pytest.mark.usefixtures("files")
class TestReplay:
    def test_groups_differ_in_nothing_but_the_configuration(self) -> None:
        four, two = replay.groups()
        assert (four.devices, four.global_batch_size, len(four.runs)) == (4, 16, 2)
        assert (two.devices, two.global_batch_size, len(two.runs)) == (2, 16, 1)
        assert [each.parallel for each in four.runs] == [Parallel(pipeline=2), Parallel(tensor=2)]
        assert [each.config.gradient_accumulation_steps for each in four.runs] == [2, 4]
        assert [each.measured_seconds for each in four.runs] == [0.5, 0.25]
        assert {each.model.block_count for each in four.runs} == {24}

    def test_a_run_of_fsdp_is_stage_3_at_the_published_throughput(self) -> None:
        (found,) = replay.tuned()  # the engine has no fp8
        assert found.measured_seconds == 2.0
        assert (found.config.zero_stage, found.config.precision) == (3, "bf16")
        assert found.config.global_batch_size(found.hardware.world_size) * 2048 == 524_288
        assert found.config.activation_checkpointing == "full"
        assert found.hardware.links is not None
        assert found.hardware.links.inter_bytes_per_second == pytest.approx(0.9 * 100e9)
        assert found.model.parameters == pytest.approx(1.316e9, rel=0.001)


def test_without_files_there_are_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_REPLAY_DIR", str(tmp_path))
    assert fsdp_rows(replay.tuned()) == []
    assert megatron_rows(replay.groups()) == []


def test_fitting_finds_the_constant_that_made_the_times() -> None:
    real = replace(FITTED, activation_traffic=12.0)
    runs = [replace(each, measured_seconds=each.predict(real).step_seconds)
            for each in (run(layers=layers, micro=micro) for layers in (4, 8) for micro in (1, 8))]
    assert fit(runs, ["activation_traffic"]).activation_traffic == pytest.approx(12.0, rel=1e-3)


def test_constant_utilisation_scales_with_operations_alone() -> None:
    others = [run(seconds=1.0), run(seconds=2.0), run(seconds=9.0)]
    assert constant_utilisation(run(micro=16), others) == pytest.approx(4.0)


def test_errors_are_those_of_throughput_with_the_model_left_out() -> None:
    runs = [replace(each, measured_seconds=2 * each.predicted_seconds)
            for each in (run("a"), run("a", micro=4), run("b", layers=8))]
    first, second, every = fsdp_rows(runs)
    assert [row["configurations"] for row in (first, second, every)] == [2, 1, 3]
    assert every["should fit %"] == 100
    assert isinstance(every["error %"], float)
    assert every["error %"] < 100


def test_ranks_are_correlated_inside_groups() -> None:
    runs = tuple(replace(run(micro=micro), measured_seconds=seconds)
                 for micro, seconds in ((1, 1.0), (2, 3.0), (4, 2.0)))
    group = Group(devices=8, global_batch_size=64, name="g", runs=runs)
    assert correlation(group, FITTED) == pytest.approx(0.5)


@pytest.mark.parametrize(("row", "expected"), [
    ({"error %": 8.8, "should fit %": 100.0}, False), ({"error %": 9.0}, True),
    ({"error %": 4.0, "should fit %": 99.3}, True), ({"correlation": 0.94}, False), ({"correlation": 0.92}, True),
    ({"median peak error %": 2.9, "95th percentile %": 7.9, "over the limit %": 2.9, "failed": 0}, False),
    ({"median peak error %": 3.1}, True), ({"95th percentile %": 8.1}, True), ({"over the limit %": 3.1}, True),
    ({"failed": 1}, True)])
def test_what_is_promised(row: dict[str, float], *, expected: bool) -> None:
    assert missed([row]) == expected


def test_every_models_times_must_be_ordered() -> None:
    for lowest, expected in ((0.91, False), (0.89, True)):
        rows = [{"step correlation": lowest}, {"step correlation": 0.99}, {"step correlation": None}]
        assert missed(rows) == expected


class TestMachine:
    def test_drawn_configurations_differ_and_train_on_the_same_batch(self) -> None:
        configs = machine.drawn(machine.CONFIGURATIONS)
        assert len(set(configs)) == machine.CONFIGURATIONS
        assert {config.global_batch_size(1) for config in configs} == {machine.SAMPLES}
        assert configs == machine.drawn(machine.CONFIGURATIONS)
        assert 3 * machine.CONFIGURATIONS >= 60

    def test_summaries_say_how_far_and_in_what_order(self) -> None:
        def row(model: str, seconds: float, peak: int, expected: float) -> machine.report.Row:
            prediction = sample_prediction(100 * 2**20).model_copy(update={"step_seconds": expected})
            return machine.row_of(model, TrainConfig(), sample_report(seconds, peak_device_bytes=peak * 2**20),
                                  prediction)

        failed = machine.row_of("a", TrainConfig(), sample_failure(Outcome.CRASHED, "no"), sample_prediction())
        one, two, every = machine.summaries([row("a", 1.0, 100, 0.1), row("a", 2.0, 110, 0.3), failed,
                                             row("b", 1.0, 80, 0.2), row("b", 2.0, 80, 0.1)])
        assert (one["configurations"], one["failed"], one["step correlation"]) == (2, 1, pytest.approx(1.0))
        assert one["over the limit %"] == pytest.approx(100 * (110 / (100 * (1 + RESERVED_SHARE)) - 1), abs=0.01)
        assert (two["step correlation"], two["over the limit %"]) == (pytest.approx(-1.0), 0.0)
        assert two["median peak error %"] == pytest.approx(25.0)
        assert (every["configurations"], every["step correlation"]) == (4, None)
