"""The built-in tiny pair, loaded once, and prompts whose answers depend on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cluster.prompt_sets import builtin_prompts
from tests.device import DEVICE_NAME
from tests.workers.random_pair import load_random_pair
from workers.assembly import Models, load_models
from workers.config import PairSpec, WorkerConfig
from workers.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def models() -> Models:
    torch.set_num_threads(1)
    return load_models(WorkerConfig(role="aggregated", pair=PairSpec(name="tiny"), device=DEVICE_NAME))


@pytest.fixture(scope="session")
def prompts(models: Models) -> list[list[int]]:
    """Six built-in prompts through the tiny pair's chat template, cut to what the small test workers hold."""
    tokenizer = Tokenizer.from_path(models.pair.target_path)
    chats = [[{"role": "user", "content": prompt.text}] for prompt in builtin_prompts(6)]
    return [tokenizer.apply_chat_template(chat)[-300:] for chat in chats]


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A pair of a few thousand random weights, where what is said does not matter."""
    torch.set_num_threads(1)
    return load_random_pair(tmp_path_factory.mktemp("random_pair"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As workers compute; ranks that are threads of one process would wait for each other's otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
