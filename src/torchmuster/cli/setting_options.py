"""Flags of the commands that take settings, and the settings that they give."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from torchmuster.cli.options import FLAG, flag
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import Resolved, resolve_settings


def _setting(text: str) -> Flag:
    path, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is not KEY=VALUE; write for example model.torch_dtype=bfloat16")
    # The value is not part of its source: it may be secret.
    return Flag(flag=f"--set {path}", path=path.strip(), text=value)


@dataclass(frozen=True, kw_only=True)
class SettingOptions:
    """The flags of every command that takes settings."""

    config: Path | None = flag("settings file (YAML)", parse=Path, metavar="FILE")
    num_gpus: str | None = flag("use N GPUs", setting="distributed.num_gpus", metavar="N")
    gpu_ids: str | None = flag(
        "use these GPUs: indices or UUIDs, as in 0,2", setting="distributed.gpu_ids", metavar="IDS"
    )
    set: tuple[Flag, ...] = flag(
        "set any setting, for example --set launch.grace=60s",
        default=(),
        repeated=True,
        parse=_setting,
        metavar="KEY=VALUE",
    )


def settings_of(options: SettingOptions) -> Resolved:
    """Resolve the settings from the flags, the environment and the file."""
    return resolve_settings(
        file=options.config, environment=os.environ, flags=setting_flags(options)
    )


def setting_flags(options: SettingOptions) -> list[Flag]:
    """Return the settings that the command line gives."""
    flags = list(options.set)
    for field in dataclasses.fields(options):
        info = field.metadata.get(FLAG)
        value = getattr(options, field.name)
        if info is None or not info.setting or value is None:
            continue
        # As JSON, which is valid YAML: YAML would parse an address in brackets as a list.
        text = value if isinstance(value, str) else json.dumps(value)
        name = f"--{field.name.replace('_', '-')}"
        flags.append(Flag(flag=name, path=info.setting, text=text))
    return flags
