"""Settings: command line over environment over file, and every wrong value is told with its source."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from encoder_svc.errors import SetupError
from encoder_svc.settings import ENVIRONMENT_PREFIX, Settings, add_arguments, load_settings
from epd.addresses import split_address


def load(*arguments: str, environment: dict[str, str] | None = None, file: Path | None = None) -> Settings:
    """Settings from a command line, an environment and a file."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = [*arguments, *(["--config", str(file)] if file is not None else [])]
    return load_settings(parser.parse_args(given), environment or {})


def refusal(*arguments: str, environment: dict[str, str] | None = None, file: Path | None = None) -> str:
    """What the operator is told."""
    with pytest.raises(SetupError) as fault:
        load(*arguments, environment=environment, file=file)
    return str(fault.value)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "settings.toml"
    file.write_text('model = "/from/file"\nmax_items = 3\narena_bytes = "2GiB"\nreflection = false\n')
    return file


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(toml: Path) -> None:
    environment = {"ENCODER_SVC_MAX_ITEMS": "4"}
    assert load(file=toml).max_items == 3
    assert load(file=toml, environment=environment).max_items == 4
    assert load("--max-items", "5", file=toml, environment=environment).max_items == 5
    assert load("--model", "m").max_items == 128


def test_each_source_can_switch_a_flag_either_way(toml: Path) -> None:
    assert load(file=toml).reflection is False
    assert load(file=toml, environment={"ENCODER_SVC_REFLECTION": "true"}).reflection is True
    assert load("--no-reflection", file=toml, environment={"ENCODER_SVC_REFLECTION": "yes"}).reflection is False
    assert load("--reflection", file=toml).reflection is True


def test_sizes_have_units(toml: Path) -> None:
    assert load(file=toml).arena_bytes == 2 << 30
    assert load("--model", "m", "--arena-bytes", "64MiB").arena_bytes == 64 << 20


def test_settings_do_not_change() -> None:
    settings = load("--model", "m")
    with pytest.raises(ValidationError):
        settings.max_items = 5


@pytest.mark.parametrize(
    ("arguments", "environment", "text", "source"),
    [
        (["--max-items", "none"], {}, "", "--max-items:"),
        ([], {"ENCODER_SVC_MAX_ITEMS": "0"}, "", "ENCODER_SVC_MAX_ITEMS:"),
        ([], {}, "max_items = -1", "max_items in {file}:"),
        (["--dtype", "float64"], {}, "", "--dtype:"),
        (["--device", "tpu"], {}, "", "--device: not a device"),
        (["--device", "cuda:x"], {}, "", "--device: not a device"),
        (["--devices", "cuda:0,tpu"], {}, "", "--devices: not devices"),
        (["--devices", "cuda:0,auto"], {}, "", "--devices: not devices"),
        (["--devices", "cuda:0,"], {}, "", "--devices: not devices"),
        (["--engines", "0"], {}, "", "--engines:"),
        (["--model-options", "sink_form"], {}, "", "--model-options: 'sink_form' is not name=value"),
        (["--model-options", "a=b,=c"], {}, "", "--model-options: '=c' is not name=value"),
        (["--media-workers", "0"], {}, "", "--media-workers:"),
        (["--forward-seconds", "0"], {}, "", "--forward-seconds:"),
        (["--canary-seconds", "-1"], {}, "", "--canary-seconds:"),
        (["--max-queued-patches", "0"], {}, "", "--max-queued-patches:"),
        (["--max-upload-bytes", "0"], {}, "", "--max-upload-bytes:"),
        (["--batch-window-seconds", "1.5"], {}, "", "--batch-window-seconds:"),
        (["--fetch-ports", "0"], {}, "", "--fetch-ports:"),
        (["--listen", "somewhere"], {}, "", "--listen: 'somewhere' is not HOST:PORT"),
        ([], {"ENCODER_SVC_LISTEN": "127.0.0.1:65536"}, "", "ENCODER_SVC_LISTEN:"),
        (["--arena-bytes", "much"], {}, "", "--arena-bytes:"),
        (["--lease-seconds", "0"], {}, "", "--lease-seconds:"),
        (["--lease-seconds", "nan"], {}, "", "--lease-seconds:"),
        (["--prepare-seconds", "inf"], {}, "", "--prepare-seconds:"),
        ([], {}, "space_seconds = 1e300", "space_seconds in {file}:"),
        ([], {}, "nonsense = 1", "nonsense in {file} is not a setting"),
        ([], {}, "[model]\nname = 1", "model in {file}:"),
        (["--prompt-arena-share", "1.5"], {}, "", "--prompt-arena-share:"),
    ],
)
def test_a_wrong_value_is_told_with_where_it_came_from(
    arguments: Sequence[str], environment: dict[str, str], text: str, source: str, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    model = () if "[model]" in text else ("--model", "m")
    told = refusal(*model, *arguments, environment=environment, file=file)
    assert told.startswith(source.format(file=file))
    assert "\n" not in told


def test_all_faults_are_told_at_once() -> None:
    told = refusal("--model", "m", "--max-items", "0", "--max-parts", "0")
    assert [line.partition(":")[0] for line in told.splitlines()] == ["--max-items", "--max-parts"]


def test_what_is_required_is_told_with_all_ways_to_give_it() -> None:
    assert refusal() == "--model is required (or ENCODER_SVC_MODEL, or model in the settings file)"


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    assert refusal(file=file).startswith(f"cannot read the settings file {file}: No such file")
    assert refusal(file=tmp_path).startswith(f"cannot read the settings file {tmp_path}: ")
    file.write_text("model = ")
    assert refusal(file=file).startswith(f"the settings file {file} is not TOML: ")
    file.write_bytes(b'model = "\xff\xfe"')
    assert refusal(file=file).startswith(f"the settings file {file} is not TOML: ")


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1"])
def test_an_insecure_public_bind_is_refused_without_a_flag(listen: str) -> None:
    told = refusal("--model", "m", "--listen", listen)
    assert "without TLS" in told
    assert "--allow-insecure" in told
    assert load("--model", "m", "--listen", listen, "--allow-insecure").listen == listen
    assert load("--model", "m", "--listen", listen, "--tls-certificate", "c", "--tls-key", "k").listen == listen


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_loopback_needs_no_flag(listen: str) -> None:
    assert load("--model", "m", "--listen", listen).listening.is_loopback


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tls-certificate", "c"], "tls_certificate and tls_key go together"),
        (["--tls-key", "k"], "tls_certificate and tls_key go together"),
        (["--tls-client-ca", "a"], "tls_client_ca needs tls_certificate"),
        (["--lease-seconds", "700"], "max_lease_seconds is less than lease_seconds"),
        (["--devices", "cuda:0,cuda:1", "--device", "cpu"], "devices names one device for each engine"),
        (["--devices", "cuda:0,cuda:1", "--engines", "2"], "devices names one device for each engine"),
        (["--max-inline-bytes", "64MiB"], "max_inline_bytes must be less than max_message_bytes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(arguments: list[str], told: str) -> None:
    assert refusal("--model", "m", *arguments).startswith(told)


def test_model_options_are_names_and_values() -> None:
    assert load("--model", "m", "--model-options", "sink_form=softmax, merger_norm=rms_norm").options == {
        "sink_form": "softmax",
        "merger_norm": "rms_norm",
    }
    assert load("--model", "m").options == {}


@pytest.mark.parametrize("devices", ["cpu", "cuda", "cuda:3", "cuda:0,cuda:1", "cuda:0, cpu"])
def test_devices_name_one_for_each_engine(devices: str) -> None:
    assert load("--model", "m", "--devices", devices).devices == devices


def test_lists_are_written_with_commas(tmp_path: Path) -> None:
    settings = load("--model", "m", "--fetch-schemes", "data, https", "--fetch-ports", "443,8443")
    assert (settings.fetch_schemes, settings.fetch_ports) == (("data", "https"), (443, 8443))
    file = tmp_path / "settings.toml"
    file.write_text('model = "m"\nfetch_roots = ["/a", "/b"]\n')
    assert load(file=file).fetch_roots == (Path("/a"), Path("/b"))


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:1", ("127.0.0.1", 1)), ("[::1]:65535", ("::1", 65535)), ("a.b:0", ("a.b", 0))],
)
def test_addresses_are_split(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", "a", ":1", "a:", "a:b", "a:65536", "a:-1", "a:1 "])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        split_address(address)


def test_help_lists_every_setting_with_its_default() -> None:
    parser = argparse.ArgumentParser(formatter_class=lambda prog: argparse.HelpFormatter(prog, width=1000))
    add_arguments(parser)
    # A long option has its description on the next line.
    lines = re.sub(r"\n {10,}", " ", parser.format_help()).splitlines()
    for name, field in Settings.model_fields.items():
        option = "--" + name.replace("_", "-")
        (line,) = [line for line in lines if line.strip().split(" ")[0].rstrip(",") == option]
        default: Any = field.default
        assert field.description
        assert field.description.replace("%%", "%") in line
        if field.is_required():
            assert "(required)" in line
        elif isinstance(default, bool):
            assert f"(default: {'yes' if default else 'no'})" in line
        elif default not in ("", None):
            assert f"(default: {default})" in line


def test_serve_help_is_that_list() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "encoder_svc.cli.main", "serve", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for name in Settings.model_fields:
        assert "--" + name.replace("_", "-") in shown


def test_every_setting_can_be_given_by_environment() -> None:
    defaults = load("--model", "m")
    given = {
        ENVIRONMENT_PREFIX + name.upper(): ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in defaults.model_dump().items()
        if value is not None
    }
    assert load(environment=given) == defaults
