"""What is shown to others holds no keys and no passwords."""

from __future__ import annotations

import pytest

from nanguard.masking import hidden


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
    ],
)
def test_other_words_stay(text):
    assert hidden(text) == text
