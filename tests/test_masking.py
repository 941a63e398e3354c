"""What is shown to others holds no keys and no passwords."""

from __future__ import annotations

import pytest

from nanguard.masking import HIDDEN, hidden, hidden_tree, hidden_words

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
        "step": 3,
    }
    assert hidden_tree(tree) == {
        "run": {"command": ["python", "--password", HIDDEN]},
        "config": {"aws_secret_access_key": HIDDEN, "password": None, "auth_token": "none"},
        "fixes": [{"diff": "+key = '(hidden)'"}],
        "pad_token": "<pad>",
        "hub_token": HIDDEN,
        "step": 3,
    }


def test_a_tree_without_end_is_followed_so_far():
    tree: list = []
    tree.append(tree)
    hidden_tree(tree)
