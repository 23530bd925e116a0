"""Engine settings: checked at once, the same on both sides, and turned into a process environment."""

import json

import pytest

from engine.config import ConfigError, EngineConfig, cpu_flags, step_environment


def test_json_carries_every_setting():
    config = EngineConfig(model_dir="m", mode="exact", threads=3, events="ipc:///tmp/e", context_length=99)
    assert EngineConfig.from_json(config.to_json()) == config


def test_an_unknown_setting_is_named():
    with pytest.raises(ConfigError, match="unknown setting colour"):
        EngineConfig.from_json(json.dumps({"colour": 1}))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"threads": 0}, "threads is 0; it must be at least 1"),
        ({"kv_tokens": 10}, "kv_tokens is 10; it must be at least four blocks"),
        ({"max_step_tokens": 16}, "max_step_tokens is 16; it must be at least 32"),
        ({"pin_budget": 1.0}, "pin_budget is 1.0"),
        ({"watermark": 0.5}, "watermark is 0.5"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be auto, fp32 or bf16"),
        ({"mode": "sloppy"}, "mode is 'sloppy'"),
        ({"max_seqs": 0}, "max_seqs is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"target_step_ms": 0}, "target_step_ms is 0"),
        ({"queue_limit": 0}, "queue_limit is 0"),
    ],
)
def test_bad_settings_name_the_field_and_what_it_must_be(settings, says):
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**settings)


def test_sizes_and_endpoints_follow_from_the_settings():
    config = EngineConfig(kv_tokens=1000, runtime_dir="/run/w", name="r1", events="ipc:///run/w/e")
    assert config.num_blocks == 63
    assert config.command_endpoint == "ipc:///run/w/r1-step.sock"
    assert config.replay_endpoint == "ipc:///run/w/e-replay"
    assert EngineConfig(events="tcp://127.0.0.1:5557").replay_endpoint == "tcp://127.0.0.1:5558"
    assert EngineConfig(events="ipc:///a", events_replay="ipc:///b").replay_endpoint == "ipc:///b"
    assert EngineConfig().replay_endpoint == ""


def test_the_step_process_waits_passively_on_its_threads():
    env = step_environment(EngineConfig(threads=2), {"PATH": "/bin", "MKL_CBWR": "COMPATIBLE"}, frozenset())
    assert env["PATH"] == "/bin"
    assert (env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"], env["KMP_BLOCKTIME"]) == ("2", "PASSIVE", "0")
    assert "MKL_CBWR" not in env


@pytest.mark.parametrize(
    ("flags", "path"), [({"avx512f", "avx2"}, "AVX512,STRICT"), ({"avx2"}, "AVX2,STRICT")]
)
def test_exact_mode_fixes_the_code_path(flags, path):
    env = step_environment(EngineConfig(mode="exact"), {}, frozenset(flags))
    assert env["MKL_CBWR"] == path


def test_cpu_flags_are_read_from_the_system(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\n")
    assert cpu_flags(info) == {"fpu", "avx2", "amx_bf16"}
    info.write_text("processor: 0\n")
    assert cpu_flags(info) == cpu_flags(tmp_path / "none") == frozenset()
    assert step_environment(EngineConfig())["OMP_NUM_THREADS"] == "1"
