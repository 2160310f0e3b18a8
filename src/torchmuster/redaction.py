"""Redact secrets in everything that is stored or shown: by their name and by their format.

Used for command lines, saved settings, logs and reports. When in doubt, the text is hidden: a
leaked token costs more than a hidden value.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping

HIDDEN = "[redacted]"

_SECRET_ENDINGS: tuple[str, ...] = ("password", "passwords", "passwd", "passphrase", "sshpass")
_SECRET_ENDINGS += ("apikey", "apikeys", "accesskey", "secretkey", "privatekey", "authtoken")
_SECRET_WORDS = {"secret", "secrets", "credential", "credentials", "pw", "cookie", "cookies"}
_SECRET_LAST_WORDS = {"pass", "pwd", "pat"}  # --pass, MYSQL_PWD, GITHUB_PAT; not pass_rate
_KINDS_OF_PASS = {"forward", "backward", "first", "second", "single", "one", "per", "low", "high"}
_KINDS_OF_PASS |= {"band", "num", "n", "max", "multi", "warmup", "all"}
_WORKING_FOLDERS = {"PWD", "OLDPWD"}
_KEY_VARIABLE = re.compile(r"-*[A-Z0-9_]+_(?:KEYS?|AUTH)")  # also REDISCLI_AUTH
_KEY_OWNERS = {"api", "access", "private", "secret", "account", "auth", "encryption"}
_KEY_OWNERS |= {"signing", "storage", "master"}
# eos_token, loss_per_token, token_id and token_type are about a tokenizer's tokens
_TOKENIZER_WORDS = {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "special", "image", "stop"}
_TOKENIZER_WORDS |= {"audio", "video", "start", "end", "first", "next", "last", "per"}
_AFTER_TOKEN = {"", "value", "key", "file"}

_SHAPES = re.compile(
    r"""
      (?<![A-Za-z0-9])(?:
          hf_[A-Za-z0-9]{16,}                       # Hugging Face
        | sk-[A-Za-z0-9_-]{16,}                     # OpenAI and look-alikes
        | gh[pousr]_[A-Za-z0-9]{20,}                # GitHub
        | github_pat_[A-Za-z0-9_]{20,}
        | glpat-[A-Za-z0-9_-]{20,}                  # GitLab
        | nvapi-[A-Za-z0-9_-]{20,}                  # NVIDIA
        | AIza[A-Za-z0-9_-]{35}                     # Google
        | (?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])     # AWS access key id
        | (?:xox[abeprs]|xapp)-[A-Za-z0-9-]{10,}    # Slack
        | (?:npm|r8)_[A-Za-z0-9]{30,}               # npm, Replicate
        | pypi-[A-Za-z0-9_-]{50,}
        | dapi[0-9a-f]{32}                          # Databricks
        | ey[A-Za-z0-9_-]{10,}\.ey[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+   # JSON web token
      )
    | -----BEGIN[A-Z ]+PRIVATE\ KEY-----.*?(?:-----END[A-Z ]+PRIVATE\ KEY-----|\Z)
    | (?<=hooks\.slack\.com/services/)[\w/-]+       # an address that is its own password
    | (?<=/api/webhooks/)[\w/-]+                    # the same, Discord
    | (?<=://)[^/\s:@]*:[^/\s]+(?=@)                # user:password in an address
    | (?<=://)[\w-]{20,}(?=@)                       # a token in the place of the user
    | (?i:(?<=signature=)|(?<=[?&]sig=))[\w%+/-]{16,}=*   # signed addresses of AWS, Google, Azure
    | (?:(?<=\s-u\s)|(?<=\s--user\s))(?!\d+:\d+)[^\s:]+:[^\s]+   # curl -u user:password
    | (?i:(?<=bearer\s)|(?<=authorization:\sbasic\s))[A-Za-z0-9._~+/-]{8,}=*
    """,
    re.VERBOSE | re.DOTALL,
)
# The text before a value: name=, name: and "name": as in shells, JSON and headers; --name
_LEAD = re.compile(
    r"""
    (?<![\w.-])(?:
        (?P<name>[\w.-]++)["']?[ \t]*[=:]+>?[ \t]*
      | (?P<flag>-[\w.-]++)[ \t]++(?!-)
      | (?:sshpass[ \t]+-p[ \t]*|wandb[ \t]+login[ \t]++)(?!-)
    )
    """,
    re.VERBOSE,
)
_VALUE = re.compile(
    r"""
      "(?:\\.|[^"\\])+"
    | '(?:\\.|[^'\\])+'
    | (?:\\.|[^\s&\\])*(?:\\.|[^\s&\\"',;)}])
    """,
    re.VERBOSE,
)
# Colors of a terminal, and all of its control sequences.
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_SEQUENCE = re.compile(
    r"(\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~]))"
)
# Whoever knows the address of a webhook can post to it.
_SECRET_ADDRESSES = frozenset({"--webhook"})


def is_secret_name(name: str) -> bool:
    """Return whether a setting, flag or variable of this name holds a secret.

    ``WANDB_API_KEY``, ``STRIPE_KEY`` and ``--hub-token`` do, ``eos_token`` and ``sort_key`` do not.
    """
    if name in _WORKING_FOLDERS:
        return False
    if _KEY_VARIABLE.fullmatch(name):
        return True
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    parts = ["", *re.sub(r"[^A-Za-z0-9]+", " ", spaced).lower().split(), ""]
    for before, word, after in zip(parts, parts[1:], parts[2:], strict=False):
        if word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS):
            return True
        if word in {"key", "keys"} and before in _KEY_OWNERS:
            return True
        last_word = word in _SECRET_LAST_WORDS and not after
        if last_word and (before or word != "pat") and before not in _KINDS_OF_PASS:
            return True
        if word == "connectionstring" or (before, word) == ("connection", "string"):
            return True
        # max_tokens is a number, so only the singular counts
        last = after in _AFTER_TOKEN or after.isdigit()
        if word == "token" and last and before not in _TOKENIZER_WORDS:
            return True
    return False


def redact_text(text: str) -> str:
    """Hide everything in a text that has the name or the format of a secret."""
    text = _SHAPES.sub(HIDDEN, text)
    shown, place = [], 0
    while lead := _LEAD.search(text, place):
        shown.append(text[place : lead.end()])
        place = lead.end()
        name = lead["name"] or lead["flag"]
        if (name is None or is_secret_name(name)) and (value := _VALUE.match(text, place)):
            quote = value[0][0] if value[0][0] == value[0][-1] and value[0][0] in "'\"" else ""
            shown.append(f"{quote}{HIDDEN}{quote}")
            place = value.end()
    return "".join([*shown, text[place:]])


def redact_command(arguments: Iterable[str]) -> list[str]:
    """Hide secrets in an argument vector, even if the value follows its flag."""
    shown: list[str] = []
    previous, value_is_secret = "", False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if value_is_secret and not argument.startswith("--"):
            shown.append(HIDDEN)
        elif value and (is_secret_name(name) or (name in _SECRET_ADDRESSES and "://" in value)):
            shown.append(f"{name}={HIDDEN}")
        elif previous in _SECRET_ADDRESSES and "://" in argument:
            shown.append(HIDDEN)
        elif previous == "sshpass" and argument.startswith("-p") and argument != "-p":
            shown.append(f"-p{HIDDEN}")
        else:
            shown.append(redact_text(argument))
        value_is_secret = (previous, argument) in {("sshpass", "-p"), ("wandb", "login")} or (
            argument.startswith("-") and not equals and is_secret_name(argument)
        )
        previous = argument.rpartition("/")[2]
    return shown


def harmless(text: str) -> str:
    """Return the text with control characters replaced, except line ends and tabs."""
    if text.isprintable():
        return text
    return "".join(char if _is_harmless(char) else "\N{REPLACEMENT CHARACTER}" for char in text)


def _is_harmless(char: str) -> bool:
    # Other spaces, and what joins the parts of a letter or an emoji, move no cursor.
    return char.isprintable() or char in "\n\t\u200c\u200d" or unicodedata.category(char) == "Zs"


def printable(arguments: Iterable[str]) -> str:
    """Join a command line for display, with secrets and control characters replaced."""
    text = " ".join(redact_command(arguments))
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def printable_line(line: str, *, colour: bool = False) -> str:
    """Return a line without terminal control sequences; colors may stay and are reset at its end."""
    if line.isprintable():
        return line
    pieces, last_colour = [], "\x1b[m"
    for index, piece in enumerate(_SEQUENCE.split(line)):
        if index % 2 == 0:
            pieces.append(harmless(piece))
        elif colour and COLOUR.fullmatch(piece):
            pieces.append(piece)
            last_colour = piece
    if last_colour not in ("\x1b[m", "\x1b[0m"):
        pieces.append("\x1b[0m")
    return "".join(pieces)


def redact_mapping(values: Mapping[str, object]) -> dict[str, object]:
    """Return a copy with secret values hidden, at every depth."""
    # {name: HF_TOKEN, value: …}, as Kubernetes writes it
    pair = is_secret_name(str(values.get("name", "")))
    return {
        name: HIDDEN
        if value and (is_secret_name(str(name)) or (pair and name == "value"))
        else _redact_value(value)
        for name, value in values.items()
    }


def _redact_value(value: object) -> object:
    if isinstance(value, Mapping):
        return redact_mapping(value)
    if isinstance(value, list | tuple):
        parts = [item for item in value if isinstance(item, str)]
        if len(parts) == len(value):
            return redact_command(parts)
        return [_redact_value(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value
