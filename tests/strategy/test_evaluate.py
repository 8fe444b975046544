"""validate, test and predict: alone, and around fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_elixir._lightning import pl
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.tiers import crossed, full
from tests.strategy.models import CHUNK, TIGHT, WIDTH, LateNet, Net, make_data, make_trainer
from tests.strategy.nets import BatchNormNet


def _evaluate(strategy: Any, make_model: Callable[[], Net], **options: Any) -> tuple[Any, ...]:
    pl.seed_everything(3, verbose=False)
    model, loaders = make_model(), [make_data(8, seed=2), make_data(8, seed=3)]
    trainer = make_trainer(strategy, **options)
    if make_model is not Net:  # several loaders give a dataloader_idx
        loaders = loaders[:1]
    validated = trainer.validate(model, loaders[0], verbose=False)
    tested = trainer.test(model, loaders[0], verbose=False)
    predicted = trainer.predict(model, loaders[0])
    return validated, tested, torch.cat(predicted)  # type: ignore[arg-type]


@crossed(
    together=1,
    options=[TIGHT, CHUNK, {**CHUNK, "gpu_memory_limit": "96KiB"}],
    inference_mode=[True, False],
    make_model=[Net, LateNet],
)
def test_alone(make_model: Callable[[], Net], inference_mode: bool, options: dict[str, Any]) -> None:
    expected = _evaluate("auto", make_model, inference_mode=inference_mode)
    strategy = ElixirStrategy(**options)
    actual = _evaluate(strategy, make_model, inference_mode=inference_mode)
    assert actual[:2] == expected[:2]
    assert torch.equal(actual[2], expected[2])
    assert (strategy.stats().evictions > 0) == ("gpu_memory_limit" in options)


class ManyLoadersNet(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
        self.log("val_loss", self.loss(batch))


def test_several_loaders() -> None:
    def run(strategy: Any) -> Any:
        pl.seed_everything(3, verbose=False)
        return make_trainer(strategy).validate(
            ManyLoadersNet(), [make_data(8, seed=2), make_data(8, seed=3)], verbose=False
        )

    assert run(ElixirStrategy(**TIGHT)) == run("auto")


@pytest.mark.parametrize("make_model", [Net, BatchNormNet])
@pytest.mark.parametrize("options", [TIGHT, full({**CHUNK, "gpu_memory_limit": "128KiB"})], ids=str)
def test_around_fit(options: dict[str, Any], make_model: Callable[[], Net]) -> None:
    def run(strategy: Any) -> Any:
        pl.seed_everything(3, verbose=False)
        model, trainer = make_model(), make_trainer(strategy)
        results: list[Any] = [trainer.validate(model, make_data(8, seed=2), verbose=False)]
        trainer.fit(model, make_data(), make_data(8, seed=2))
        results.append(trainer.test(model, make_data(8, seed=2), verbose=False))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, make_data(), make_data(8, seed=2))
        results.append(trainer.validate(model, make_data(8, seed=2), verbose=False))
        return results, [loss.item() for loss in model.losses]

    assert run(ElixirStrategy(**options)) == run("auto")


class ParameterlessNet(Net):
    is_made_in_init = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize("options", [{}, {"placement_policy": "cpu", "gpu_memory_limit": "96KiB"}], ids=str)
def test_model_without_parameters_predicts(options: dict[str, Any]) -> None:
    expected = make_trainer("auto").predict(ParameterlessNet(), make_data(8))
    actual = make_trainer(ElixirStrategy(**options)).predict(ParameterlessNet(), make_data(8))
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))  # type: ignore[arg-type]


def test_model_can_be_called_after_fit() -> None:
    x = torch.randn(4, 32)

    def run(strategy: Any) -> torch.Tensor:
        pl.seed_everything(3, verbose=False)
        model = Net()
        make_trainer(strategy).fit(model, make_data())
        model.eval()
        with torch.no_grad():
            return model(x)

    assert torch.equal(run(ElixirStrategy(**TIGHT)), run("auto"))


class PaddedNet(Net):
    """Torch's encoder, which makes nested tensors of what is padded, and then needs all of each layer at once."""

    is_nested = True

    def _make(self) -> None:
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))  # whose use brings what is in its chunk
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 48, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=self.is_nested)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([3, 5])[:, None]
        sequences = x.view(2, -1, WIDTH)[:, :5] * self.scale
        return self.layers(sequences, src_key_padding_mask=torch.arange(sequences.shape[1]) >= lengths)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self(batch[0]).square().mean()


class UnnestedNet(PaddedNet):
    is_nested = False


@pytest.mark.parametrize("chunk", ["24KiB", "64KiB", full("200KiB")])
def test_padded_inputs_of_an_encoder_give_the_same_whatever_the_size_of_chunks(chunk: str) -> None:
    """With the first layers in one chunk, and others cut by borders, the encoder made nested tensors, and a layer
    raised."""

    def run(strategy: Any, make_model: Callable[[], Net]) -> torch.Tensor:
        pl.seed_everything(3, verbose=False)
        model = make_model()
        padded: Any = make_trainer(strategy).predict(model, make_data(16, batch_size=16))
        assert model.layers.use_nested_tensor == isinstance(strategy, ElixirStrategy)
        return torch.cat(padded)

    actual = run(ElixirStrategy(placement_policy="cpu", chunk_size=chunk, gpu_memory_limit="1300KiB"), PaddedNet)
    torch.testing.assert_close(actual, run("auto", UnnestedNet))
