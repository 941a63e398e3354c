"""What is shown to others holds no keys and no passwords."""

from __future__ import annotations

import pytest

from nanguard.masking import HIDDEN, hidden, hidden_tree, hidden_words
from tests.cost import cpu_seconds

HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("token: hf_abcdefghijklmnop", "token: (hidden)"),
        ('WANDB_API_KEY = "0123456789abcdef"', "WANDB_API_KEY = (hidden)"),
        ('{"lr": 0.1, "api_key": "a b", "x": 1}', '{"lr": 0.1, "api_key": (hidden), "x": 1}'),
        ("db_password: p@ss!word", "db_password: (hidden)"),
        ("password: 123456 # mine", "password: (hidden) # mine"),
        ("{secret: abc, lr: 1}", "{secret: (hidden), lr: 1}"),
        ("key: sk-abcdefghijkl1234", "key: (hidden)"),
        ("db: https://me:pw@host/x", "db: https://me:(hidden)@host/x"),
        ("train.py --hub-token=abcd --lr 1", "train.py --hub-token=(hidden) --lr 1"),
        ("train.py --db-password 'a b' x", "train.py --db-password (hidden) x"),
        (f"wandb login {HEX}", "wandb login (hidden)"),
        (f"wandb.login(key='{HEX}')", "wandb.login(key='(hidden)')"),
        ("HF_TOKEN=0123456789abcd", "HF_TOKEN=(hidden)"),
        ("Authorization: Bearer abcdef0123456", "Authorization: Bearer (hidden)"),
        ("curl -H 'bearer abcdef0123456'", "curl -H 'bearer (hidden)'"),
        ("train.py --auth=abcd --lr 1", "train.py --auth=(hidden) --lr 1"),
        ("jwt: eyJhbGciOiJI.eyJzdWIiOiIx.SflKxw", "jwt: (hidden)"),
        ("s3://b?X-Amz-Signature=0123456789abcdef&x=1", "s3://b?X-Amz-Signature=(hidden)&x=1"),
        ("Name=a;AccountKey=abcdefghijklmn==;x", "Name=a;AccountKey=(hidden);x"),
        ("passwords: [a, b]\nlr: 1", "passwords: (hidden)\nlr: 1"),
        (
            "db:\n  secret: |\n    one\n\n    two\n  lr: 1\nx: 2",
            "db:\n  secret: (hidden)\n  lr: 1\nx: 2",
        ),
        (
            "k: |\n  -----BEGIN RSA PRIVATE KEY-----\n  abc\n  -----END RSA PRIVATE KEY-----",
            "k: |\n  (hidden)-----END RSA PRIVATE KEY-----",
        ),
    ],
)
def test_secrets_are_hidden(text, shown):
    assert hidden(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "pad_token: '<pad>'",
        "max_tokens: 512",
        "tokenizer: gpt2-medium-large",
        "use_auth_token: true",
        "password: null # none",
        "train.py --tokenizer gpt2 --max-tokens 512",
        "train.py --use-password --lr 1e-3",
        "path: sqlite:///a:b",
        f"revision: {HEX}",
        f"commit {HEX}",
        f"sha256: {HEX}{HEX[:24]}",
        "bearer of bad news",
        "author: me",
        "auth: none",
        "authorization: required",
        "sig=0.5",
        "notes: |\n  the secret of training\nlr: 1",
    ],
)
def test_other_words_stay(text):
    assert hidden(text) == text


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["--api-key", "a b", "--lr", "1"], ["--api-key", HIDDEN, "--lr", "1"]),
        (["--password=x", "--token", "y"], ["--password=(hidden)", "--token", HIDDEN]),
        (["--use-password", "--lr", "1"], ["--use-password", "--lr", "1"]),
        (["--tokenizer", "gpt2", HEX], ["--tokenizer", "gpt2", HIDDEN]),
        (["env", f"WANDB_API_KEY={HEX}", "python"], ["env", "WANDB_API_KEY=(hidden)", "python"]),
    ],
)
def test_secrets_in_commands_are_hidden(command, shown):
    assert hidden_words(command) == shown
    assert hidden_words(shown) == shown


def test_secrets_in_trees_are_hidden():
    tree = {
        "run": {"command": ["python", "--password", "x y"]},
        "config": {"aws_secret_access_key": "abc", "password": None, "auth_token": "none"},
        "fixes": [{"diff": "+key = 'sk-abcdefghijkl1234'"}],
        "pad_token": "<pad>",
        "hub_token": "averylongtoken",
        "passwords": ["a", {"b": 1234}],
        "secret_number": 7,
        "use_secret": True,
        "step": 3,
    }
    assert hidden_tree(tree) == {
        "run": {"command": ["python", "--password", HIDDEN]},
        "config": {"aws_secret_access_key": HIDDEN, "password": None, "auth_token": "none"},
        "fixes": [{"diff": "+key = '(hidden)'"}],
        "pad_token": "<pad>",
        "hub_token": HIDDEN,
        "passwords": [HIDDEN, {"b": HIDDEN}],
        "secret_number": HIDDEN,
        "use_secret": True,
        "step": 3,
    }


@pytest.mark.parametrize(
    "part",
    ["password" * 5, "secret: |\n ", "-----BEGIN PRIVATE KEY-----\n", "eyJaaaaaaaaa.", "bearer "],
)
def test_hiding_takes_time_in_step_with_the_text(part):
    few, many = part * 400, part * 6400
    assert cpu_seconds(lambda: hidden(many)) < 80 * cpu_seconds(lambda: hidden(few)) + 0.5


def test_a_tree_without_end_is_followed_so_far():
    tree: list = []
    tree.append(tree)
    hidden_tree(tree)
