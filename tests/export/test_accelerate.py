"""Accelerate's YAML, read with Accelerate itself where possible."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.domain.errors import ExportError
from autotune.export import export
from tests.export.support import best
from tests.search.support import model_profile


def written(format: str, **config: Any) -> dict[str, Any]:
    loaded = yaml.safe_load(export(best(**config), format).text)
    assert isinstance(loaded, dict)
    return loaded


def notes(format: str, **config: Any) -> str:
    return "\n".join(export(best(**config), format).notes)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("format", ["accelerate", "accelerate-fsdp", "accelerate-fsdp1"])
def test_accelerate_s_own_loader_accepts_it(format: str, stage: int, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "config.yaml"
    file.write_text(export(best(zero_stage=stage, precision="bf16", compile=True), format).text)
    config = load_config_from_file(str(file))
    assert config.num_processes == 2
    assert config.mixed_precision == "bf16"
    assert config.dynamo_config["dynamo_use_regional_compilation"] is True


@pytest.mark.parametrize("format", ["accelerate", "accelerate-fsdp", "accelerate-fsdp1"])
def test_every_section_key_is_an_option_of_accelerate_launch(format: str) -> None:
    from accelerate.commands.launch import launch_command_parser

    options = {action.dest for action in launch_command_parser()._actions}
    config = written(format, zero_stage=3, compile=True, gradient_clipping=1.0, activation_checkpointing="full")
    for section in ("deepspeed_config", "fsdp_config", "dynamo_config"):
        assert set(config.get(section, {})) <= options


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("format", ["accelerate-fsdp", "accelerate-fsdp1"])
def test_accelerate_s_fsdp_plugin_is_built_from_it(format: str, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        monkeypatch.delenv(name)
    section = written(format, zero_stage=stage)["fsdp_config"]
    for key, value in section.items():
        name = key.upper().replace("FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP")
        monkeypatch.setenv(name, str(value).lower() if isinstance(value, bool) else str(value))
    monkeypatch.setenv("FSDP_SYNC_MODULE_STATES", "false")  # true asks for an accelerator
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == section["fsdp_version"]
    assert plugin.transformer_cls_names_to_wrap == ["Block"]
    if plugin.fsdp_version == 2:
        assert plugin.reshard_after_forward is (stage == 3)


class TestDeepSpeedFlavour:
    def test_the_values_it_has_keys_for(self) -> None:
        config = written("accelerate", zero_stage=3, precision="bf16", offload_optimizer_ratio=1.0, offload_param=True,
                         gradient_clipping=0.5)
        assert config["distributed_type"] == "DEEPSPEED"
        assert config["deepspeed_config"] == {
            "zero_stage": 3, "gradient_accumulation_steps": 4, "offload_optimizer_device": "cpu",
            "offload_param_device": "cpu", "zero3_init_flag": True, "zero3_save_16bit_model": True,
            "gradient_clipping": 0.5}
        assert (config["num_processes"], config["num_machines"], config["mixed_precision"]) == (2, 1, "bf16")

    def test_what_has_no_key_is_in_the_comments(self) -> None:
        file = export(best(zero_stage=2, reduce_bucket_size=123), "accelerate")
        assert "# - reduce_bucket_size 123 is left out" in file.text
        assert "# - micro_batch_size 4 is left out: set it in your script" in file.text

    def test_both_files_of_a_pair_agree_on_the_precision(self) -> None:
        import json

        for precision in ("bf16", "fp16"):
            other = json.loads(export(best(precision=precision), "deepspeed-hf").text)
            assert written("accelerate", precision=precision)["mixed_precision"] == precision
            assert other[precision]["enabled"] is True
            assert sum(other[name]["enabled"] for name in ("bf16", "fp16")) == 1


class TestMixedPrecision:
    @pytest.mark.parametrize("format", ["accelerate", "accelerate-fsdp", "accelerate-fsdp1"])
    def test_none_is_the_quoted_word_no(self, format: str) -> None:
        assert "mixed_precision: 'no'\n" in export(best(zero_stage=3), format).text
        assert written(format, zero_stage=3)["mixed_precision"] == "no"

    def test_states_in_the_compute_precision_mean_a_model_loaded_in_it(self) -> None:
        assert written("accelerate-fsdp", zero_stage=3, precision="bf16", optimizer_precision="compute")[
            "mixed_precision"] == "no"
        assert "dtype=torch.bfloat16" in notes("accelerate-fsdp", zero_stage=3, precision="bf16",
                                               optimizer_precision="compute")


class TestFsdp:
    @pytest.mark.parametrize(("stage", "reshards"), [(2, False), (3, True)])
    def test_version_2_reshards_after_forward_at_stage_3_only(self, stage: int, reshards: bool) -> None:
        section = written("accelerate-fsdp", zero_stage=stage)["fsdp_config"]
        assert (section["fsdp_version"], section["fsdp_reshard_after_forward"]) == (2, reshards)

    @pytest.mark.parametrize(("stage", "strategy"), [(0, "NO_SHARD"), (2, "SHARD_GRAD_OP"), (3, "FULL_SHARD")])
    def test_version_1_names_a_strategy(self, stage: int, strategy: str) -> None:
        section = written("accelerate-fsdp1", zero_stage=stage)["fsdp_config"]
        assert (section["fsdp_version"], section["fsdp_reshard_after_forward"]) == (1, strategy)

    @pytest.mark.parametrize("format", ["accelerate-fsdp", "accelerate-fsdp1"])
    def test_stage_1_is_refused_with_what_to_use(self, format: str) -> None:
        with pytest.raises(ExportError, match=r"zero_stage 1: FSDP shards gradients.*deepspeed"):
            export(best(zero_stage=1), format)

    @pytest.mark.parametrize(("ranks", "device_type", "kind"), [
        (2, "cuda", "MULTI_GPU"), (2, "cpu", "MULTI_CPU"), (1, "cuda", "NO")])
    def test_version_2_has_plain_data_parallelism_for_stage_0(self, ranks: int, device_type: str, kind: str) -> None:
        config = written("accelerate-fsdp", zero_stage=0, world_size=ranks, device_type=device_type)
        assert config["distributed_type"] == kind
        assert "fsdp_config" not in config
        assert "stage 0 shards nothing" in notes("accelerate-fsdp", zero_stage=0)

    def test_the_wrapped_class_is_the_model_s_own_block(self) -> None:
        section = written("accelerate-fsdp", zero_stage=3, model=model_profile(block_class="MyBlock"))["fsdp_config"]
        assert section["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
        assert section["fsdp_transformer_layer_cls_to_wrap"] == "MyBlock"

    def test_without_a_repeated_block_modules_are_wrapped_by_size(self) -> None:
        model = model_profile(block_class=None, block_count=0, block_parameters=0)
        section = written("accelerate-fsdp", zero_stage=3, model=model)["fsdp_config"]
        assert section["fsdp_auto_wrap_policy"] == "SIZE_BASED_WRAP"
        assert section["fsdp_min_num_params"] == 537_500
        assert "fsdp_transformer_layer_cls_to_wrap" not in section

    def test_offload_is_everything_or_nothing(self) -> None:
        assert written("accelerate-fsdp", zero_stage=3, offload_optimizer_ratio=1.0, offload_param=True)[
            "fsdp_config"]["fsdp_offload_params"] is True
        for part in ({"offload_optimizer_ratio": 0.5}, {"offload_optimizer_ratio": 1.0}, {"offload_param": True}):
            with pytest.raises(ExportError, match="together and entirely"):
                export(best(zero_stage=3, **part), "accelerate-fsdp")
