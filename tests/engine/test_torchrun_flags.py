"""The table of torchrun's flags has every flag of the installed torchrun, with its value."""

import pytest
from torch.distributed.run import get_args_parser

from torchmuster.cli.torchrun_flags import flag_named

pytestmark = pytest.mark.engine


def test_every_flag_of_the_installed_torchrun_is_in_the_table() -> None:
    actions = [one for one in get_args_parser()._actions if one.option_strings]
    flags = {name: one for one in actions for name in one.option_strings if "help" not in one.dest}
    assert len(flags) > 50
    missing = [name for name in flags if flag_named(name) is None]
    assert missing == []
    for name, action in flags.items():
        flag = flag_named(name)
        assert flag is not None
        assert bool(flag.value) == (action.nargs != 0), name
        assert flag.variable == f"PET_{action.dest.upper()}"
