"""No secret may survive in what is shown or saved, and what is no secret must stay readable."""

import shlex
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmuster.redaction import (
    HIDDEN,
    harmless,
    is_secret_name,
    redact_command,
    redact_mapping,
    redact_text,
)

# None of these is a real one; each has the shape its service gives out.
HF = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567"
OPENAI = "sk-proj-" + "abcDEF0123456789_-abcDEF0123456789"
GITHUB = "ghp_" + "0123456789abcdefghijABCDEFGHIJ012345"
GITHUB_FINE = "github_pat_" + "11ABCDEFG0abcdefghijkl_0123456789abcdef"
GITLAB = "glpat-" + "abcdefghij0123456789"
NVIDIA = "nvapi-" + "abcdefghijABCDEFGHIJ0123456789-_abc"
GOOGLE = "AIza" + "SyA0123456789abcdefghijklmnopqrstuv"
AWS_ID = "AKIA" + "IOSFODNN7EXAMPLE"
SLACK = "xoxb-" + "123456789012-abcdefghijkl"
JWT = "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0" + ".dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"
WANDB = "0123456789abcdef0123456789abcdef01234567"
NPM = "npm_" + "0123456789abcdefghijABCDEFGHIJ012345"
REPLICATE = "r8_" + "0123456789abcdefghijABCDEFGHIJ0123456"
PYPI = "pypi-" + "AgEIcHlwaS5vcmc" * 4
DATABRICKS = "dapi" + "0123456789abcdef" * 2
PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r\nZXk=\n-----END OPENSSH PRIVATE KEY-----"

SECRET_NAMES = shlex.split("""
    HF_TOKEN HUGGING_FACE_HUB_TOKEN --hub-token --hub_token hubToken HFToken token TOKEN_2 token_value
    WANDB_API_KEY COMET_API_KEY api-key apikey APIKey x-api-key --api_keys OPENAI_API_KEY
    AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN aws_secret_access_key accesskey
    AZURE_STORAGE_KEY account_key private_key ssh_private_key encryption_key MASTER_KEY
    MODAL_TOKEN_SECRET OAUTH_TOKEN_SECRET client_secret secret secrets SECRET_KEY
    password db.password PGPASSWORD MYSQL_ROOT_PASSWORD --passwd passphrase SSHPASS NGROK_AUTHTOKEN
    GOOGLE_APPLICATION_CREDENTIALS credential password_file
    --pw --pass MYSQL_PWD DB_PASS STRIPE_KEY GITHUB_PAT AZURE_STORAGE_CONNECTION_STRING connectionString
""")

OPEN_NAMES = shlex.split("""
    PWD OLDPWD sort_key cache_key --key pass_rate --passes compass --pattern
    eos_token eos_token_2 pad_token bos_token unk_token --mask-token pad_token_id eos_token_id token_type_ids
    decoder_start_token_id additional_special_tokens max_tokens max_new_tokens num_tokens tokens
    tokens_per_second loss_per_token time_to_first_token next_token token_embedding token_dropout
    tokenizer tokenizer_path --tokenizer-file tokenizer_name_or_path lr learning_rate
    key keys sort_key primary_key key_padding_mask num_key_value_heads cache_key keyboard
    monkey secretary_problem passes forward_pass experiment_name master_port
    CUDA_VISIBLE_DEVICES PATH USER
""")


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert redact_text(f"{name}=hunter2") == f"{name}={HIDDEN}"


@pytest.mark.parametrize("name", OPEN_NAMES)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)
    assert redact_text(f"{name}=hunter2") == f"{name}=hunter2"
    assert redact_command([name, "hunter2"]) == [name, "hunter2"]


@pytest.mark.parametrize(
    "secret",
    [
        HF,
        OPENAI,
        GITHUB,
        GITHUB_FINE,
        GITLAB,
        NVIDIA,
        GOOGLE,
        AWS_ID,
        SLACK,
        JWT,
        PEM,
        NPM,
        REPLICATE,
        PYPI,
        DATABRICKS,
    ],
)
@pytest.mark.parametrize("around", ["{}", "saved as run_{}", "({}).", "'{}'", "a\n{}\nb"])
def test_shapes_of_secrets(secret: str, around: str) -> None:
    assert redact_text(around.format(secret)) == around.format(HIDDEN)


@pytest.mark.parametrize(
    "text",
    [
        "--lr 1e-4 --eos_token </s> --max_tokens 4096 --pad_token_id 0",
        "tokenizer: /data/llama/tokenizer.json, 32000 tokens",
        "https://huggingface.co/Qwen/Qwen2.5-7B/tree/main?path=a&rev=b",
        "http://localhost:8080/metrics and tcp://10.0.0.1:29500",
        "git+ssh://git@github.com:22/team/repo.git@v1.2",
        "ann@gpu-server:/home/ann/.ssh/id_ed25519",
        "commit 4b825dc642cb6eb9a060e54bf8d69288fbee4904",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "GPU-0515791b-9f8f-58f5-98b5-48e51d0d99d9,MIG-55562eac-e5a4-5be4-8c1d-798d803cb4f6",
        "00:1a.0 NVIDIA A100-SXM4-80GB, driver 550.54.14, CUDA 12.4",
        "step 12: loss 2.31, loss_per_token=0.02, 15 tokens/s, 03:12:45 elapsed",
        "task-3d9f0c1b-eager-attention-benchmark disk-0123456789abcdef0",
        "the password is wrong\npassword:\nTraceback (most recent call last):",
        "wandb login --relogin",
        "train.py --hub-token=",
        "docker run --user 1000:1000 -u 0:0 image python -u train.py",
        "the bearer of news, a basic authorization: none",
    ],
)
def test_what_is_no_secret_stays_as_it_is(text: str) -> None:
    assert redact_text(text) == text
    assert redact_command(text.split()) == text.split()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('export HF_TOKEN="two words"', 'export HF_TOKEN="[redacted]"'),
        ("{'token': 'it\\'s me', 'lr': 1}", "{'token': '[redacted]', 'lr': 1}"),
        ('{"password": "hunter2", "lr": 1}', '{"password": "[redacted]", "lr": 1}'),
        ("password: hunter2  # mine", "password: [redacted]  # mine"),
        ("password=a,b;c'd!e)f rest", "password=[redacted] rest"),
        ("password=two\\ words rest", "password=[redacted] rest"),
        ("f(token=abc, lr=1)", "f(token=[redacted], lr=1)"),
        ("https://x.org/?token=abc&page=2", "https://x.org/?token=[redacted]&page=2"),
        ('token="" lr=1', 'token="" lr=1'),
        ("WARNING:root:token=abc", "WARNING:root:token=[redacted]"),
        ("if password == 'hunter2':", "if password == '[redacted]':"),
        ("ran: train.py --hub-token abc --lr 1", "ran: train.py --hub-token [redacted] --lr 1"),
        ("https://ann:pw@proxy:3128/x", "https://[redacted]@proxy:3128/x"),
        ("redis://:p@ss@host:6379/0", "redis://[redacted]@host:6379/0"),
        ("https://abcdefghij0123456789@github.com/a", "https://[redacted]@github.com/a"),
        ("s3?X-Amz-Signature=0123456789abcdef0&b=1", "s3?X-Amz-Signature=[redacted]&b=1"),
        ("blob?sv=1&sig=abcdefghijklmnop%2B0%3D&b", "blob?sv=1&sig=[redacted]&b"),
        (f"private_key: {PEM} end", "private_key: [redacted] end"),
        ("curl -u ann:hunter2 https://x", "curl -u [redacted] https://x"),
        ("Cookie: session=abc", "Cookie: [redacted]"),
        ("REDISCLI_AUTH=hunter2", "REDISCLI_AUTH=[redacted]"),
        (PEM[:60], "[redacted]"),
        ("Authorization: Bearer abcdefgh.ij", "Authorization: Bearer [redacted]"),
        ("authorization: basic YW5uOnB3cHc=", "authorization: basic [redacted]"),
        (
            "https://hooks.slack.com/services/T0/B0/xYz",
            "https://hooks.slack.com/services/[redacted]",
        ),
        ("https://discord.com/api/webhooks/1/xYz", "https://discord.com/api/webhooks/[redacted]"),
    ],
)
def test_secrets_in_texts(text: str, shown: str) -> None:
    assert redact_text(text) == shown
    assert redact_text(shown) == shown


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (f"wandb login {WANDB}", "wandb login [redacted]"),
        (f"env WANDB_API_KEY={WANDB} python t.py", "env WANDB_API_KEY=[redacted] python t.py"),
        (f"python -m wandb login {WANDB}", "python -m wandb login [redacted]"),
        ("huggingface-cli login --token abc", "huggingface-cli login --token [redacted]"),
        ("hf auth login --token=abc --add", "hf auth login --token=[redacted] --add"),
        (f"hf download a/b --rev {HF}", "hf download a/b --rev [redacted]"),
        ("aws configure set aws_secret_access_key=a/b+c x", None),
        (f"env AWS_ACCESS_KEY_ID={AWS_ID} AWS_SECRET_ACCESS_KEY=wJal/K7+b aws s3 ls", None),
        ("docker run -e HF_TOKEN=abc --env=WANDB_API_KEY=abc --gpus all image", None),
        (
            "srun --export=ALL,WANDB_API_KEY=abc train.sh",
            "srun --export=ALL,WANDB_API_KEY=[redacted] train.sh",
        ),
        ("train.py --webhook https://hooks.slack.com/services/T0/B0/abc", None),
        (
            f"train.py --notify slack --slack-bot {SLACK}",
            "train.py --notify slack --slack-bot [redacted]",
        ),
        ("sshpass -p hunter2 ssh ann@node1", "sshpass -p [redacted] ssh ann@node1"),
        ("/usr/bin/sshpass -phunter2 ssh node1", "/usr/bin/sshpass -p[redacted] ssh node1"),
        ("ssh -i ~/.ssh/id_rsa -p 2222 node1", "ssh -i ~/.ssh/id_rsa -p 2222 node1"),
        ("env 'HF_TOKEN=abc abc' t.py", "env HF_TOKEN=[redacted] t.py"),
        (
            "bash -c 'python t.py --hub-token abc --lr 1'",
            "bash -c 'python t.py --hub-token [redacted] --lr 1'",
        ),
        (
            "bash -c 'sshpass -p hunter2 ssh n; wandb login abc'",
            "bash -c 'sshpass -p [redacted] ssh n; wandb login [redacted]'",
        ),
        (
            "curl -H 'Authorization: Bearer abcdefghijk' x",
            "curl -H 'Authorization: Bearer [redacted]' x",
        ),
        (
            "train.py '--password=two, words' --lr 1e-4",
            "train.py '--password=[redacted]' --lr 1e-4",
        ),
        ("train.py --password -dash-first --lr 1e-4", "train.py --password [redacted] --lr 1e-4"),
        ("train.py --use-auth-token --lr 1e-4", "train.py --use-auth-token --lr 1e-4"),
        ("muster train --set model.hub_token=abc", "muster train --set model.hub_token=[redacted]"),
        (
            "torchrun --nproc-per-node=4 t.py --eos-token '</s>'",
            "torchrun --nproc-per-node=4 t.py --eos-token '</s>'",
        ),
    ],
)
def test_command_lines_as_people_type_them(command: str, shown: str | None) -> None:
    words = redact_command(shlex.split(command))
    if shown is not None:
        assert words == shlex.split(shown)
    for secret in (WANDB, AWS_ID, "wJal", "hunter2", "abc", "a/b+c"):
        assert secret not in " ".join(words)


def test_settings_are_redacted_at_every_depth() -> None:
    stored = {
        "experiment_name": "llama",
        "lr": 1e-4,
        "tokenizer": {"eos_token": "</s>", "pad_token_id": 0},
        "tracker": {"api_key": "abc", "url": "https://ann:pw@host/x", "password": ""},
        "nodes": [{"ssh": {"passphrase": "abc"}}, ("a", f"see {HF}"), 3, None],
        "command": ["python", "t.py", "--hub-token", "abc", "--lr", "1"],
        "env": [{"name": "HF_TOKEN", "value": "abc"}, {"name": "LR", "value": "1"}],
        "secrets": {"any": "thing"},
        7: {8: "password=abc"},
    }
    before = repr(stored)
    assert redact_mapping(stored) == {  # type: ignore[arg-type]  # files may have other keys
        "experiment_name": "llama",
        "lr": 1e-4,
        "tokenizer": {"eos_token": "</s>", "pad_token_id": 0},
        "tracker": {"api_key": HIDDEN, "url": "https://[redacted]@host/x", "password": ""},
        "nodes": [{"ssh": {"passphrase": HIDDEN}}, ["a", "see [redacted]"], 3, None],
        "command": ["python", "t.py", "--hub-token", HIDDEN, "--lr", "1"],
        "env": [{"name": "HF_TOKEN", "value": HIDDEN}, {"name": "LR", "value": "1"}],
        "secrets": HIDDEN,
        7: {8: "password=[redacted]"},
    }
    assert repr(stored) == before


secrets = st.text(string.ascii_letters + string.digits + "+/._~!%^*", min_size=8, max_size=40).map(
    lambda text: f"Zq{text}7"
)
names = st.sampled_from(SECRET_NAMES)
prose = st.text(string.ascii_letters + string.digits + " .,:;=-_/@\"'\n", max_size=40)


@settings(deadline=None)
@given(
    secret=secrets, name=names, sign=st.sampled_from(["=", ": ", " = ", ":", '": "']), before=prose
)
def test_a_named_secret_never_survives_in_a_text(
    secret: str, name: str, sign: str, before: str
) -> None:
    assert secret not in redact_text(f"{before} {name}{sign}{secret} after")


@settings(deadline=None)
@given(secret=secrets, name=names, before=st.lists(prose), after=st.lists(prose))
def test_a_named_secret_never_survives_in_a_command(
    secret: str, name: str, before: list[str], after: list[str]
) -> None:
    flag = f"--{name.lstrip('-')}"
    for planted in ([flag, secret], [f"{flag}={secret} x,{secret}"], [f"{name}={secret}"]):
        assert not any(secret in word for word in redact_command([*before, *planted, *after]))


@settings(deadline=None)
@given(secret=secrets, name=names, depth=st.integers(0, 4))
def test_a_named_secret_never_survives_in_settings(secret: str, name: str, depth: int) -> None:
    stored: dict[str, object] = {name: secret, "list": [f"{name}={secret}"]}
    for _ in range(depth):
        stored = {"section": [stored]}
    assert secret not in repr(redact_mapping(stored))


@settings(deadline=None)
@given(prose)
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    assert redact_text(redact_text(text)) == redact_text(text)


@pytest.mark.parametrize(
    "piece",
    ["a", "a-", "token=", "://a:", "ey", "-----BEGIN X PRIVATE KEY-----", "hf_", '"\\', "w "],
)
def test_a_long_line_takes_no_longer_than_its_length_allows(piece: str) -> None:
    """If the time grew with the square of the length, this would take hours."""
    redact_text('token="' + piece * (300_000 // len(piece)))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("10\u00a0000 \u3000 👨\u200d💻\tend\n", "10\u00a0000 \u3000 👨\u200d💻\tend\n"),
        ("a\x1b[2Jb\rc\u202ed\x9be", "a�[2Jb�c�d�e"),
    ],
)
def test_harmless_keeps_what_only_shows(text: str, shown: str) -> None:
    assert harmless(text) == shown


@pytest.mark.parametrize("name", ["--low-pass", "high_pass", "num_pass", "n_pass", "warmup_pass"])
def test_a_pass_over_data_is_no_secret(name: str) -> None:
    assert not is_secret_name(name)
