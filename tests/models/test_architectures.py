"""Image models that are built here: their sizes are the papers', and the gate's normalisation is that of Luo et al."""

import pytest
import small_process
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import ResNetConfig, ResNetModel

from llm_fed.basics.rng import generator
from llm_fed.models.cnn import CNNS
from llm_fed.models.images import RESNETS
from llm_fed.models.joined import Gate, SwitchNorm

RESNET_9 = RESNETS["resnet-9"]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


def shaken(module: nn.Module) -> nn.Module:
    """In float64, with parameters and statistics away from where they start."""
    module.double()
    for seed, (name, tensor) in enumerate(module.state_dict().items()):
        if tensor.is_floating_point():
            noise = 0.3 * draw(*tensor.shape, seed=seed)
            tensor.add_(noise.abs() if name.endswith("running_var") else noise)
    return module


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def without_gradient(module: nn.Module, images: Tensor) -> list[str]:
    """The names of the parameters that a loss does not move."""
    output = module(images)
    (output * draw(*output.shape, seed=9)).sum().backward()
    return [name for name, p in module.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-12]


# The FedMoE paper's networks


@pytest.mark.parametrize(
    "name, parameters, mebibytes",
    [("cnn-1", 2_621_558, 10.00), ("cnn-2", 1_815_142, 6.92), ("cnn-3", 1_320_558, 5.04), ("cnn-4", 1_060_358, 4.04),
     ("cnn-5", 670_058, 2.56)],
)  # fmt: skip
def test_five_networks_have_the_sizes_of_the_table(name, parameters, mebibytes):
    """FedMoE, Table 4: 10.00, 6.92 and 5.04 MB of float32; it gives 3.81 and 2.55 for the last two."""
    ten, hundred = CNNS[name](10), CNNS[name](100)
    assert size(ten) == parameters and size(hundred) == parameters + 90 * 501
    assert round(4 * parameters / 2**20, 2) == mebibytes
    assert hundred(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_a_network_of_the_table_layer_by_layer():
    """ReLU before pooling, as it is usually written, gives the same; and every parameter learns."""
    model = shaken(CNNS["cnn-5"](3))
    images = draw(4, 3, 32, 32)
    values = images
    for layer in (model.conv1, model.conv2):
        values = functional.max_pool2d(layer(values).clamp(min=0), 2)
    assert values.shape == (4, 32, 5, 5)
    values = model.fc2(model.fc1(values.reshape(4, 800)).clamp(min=0)).clamp(min=0)
    torch.testing.assert_close(model(images), model.head(values))
    assert without_gradient(model, images) == []


# The FedMerge paper's ResNets


@pytest.mark.parametrize(
    "name, parameters, scale",
    [("resnet-9", 77_807, 1), ("resnet-18", 176_207, 2.27), ("resnet-34", 334_959, 4.32), ("resnet-50", 374_991, 4.82),
     ("resnet-101", 677_455, 8.73), ("resnet-152", 926_927, 11.95)],
)  # fmt: skip
def test_resnets_have_the_scales_of_the_table(name, parameters, scale):
    """FedMerge, Table 1: the scales over ResNet-9, which seven classes (PACS) give to within 0.5 %."""
    assert size(RESNETS[name](7)) == parameters
    assert parameters / 77_807 == pytest.approx(scale, rel=0.005)


@pytest.mark.parametrize("name, layer_type, factor", [("resnet-18", "basic", 1), ("resnet-50", "bottleneck", 4)])
def test_resnet_blocks_are_those_of_transformers(name, layer_type, factor):
    """Given the same weights, all stages compute what transformers' do: where strides and shortcuts stand agrees."""
    ours = RESNETS[name](7).stages.double().eval()
    config = ResNetConfig(embedding_size=8, hidden_sizes=[factor * width for width in (8, 16, 32, 64)],
                          depths=[len(stage) for stage in ours], layer_type=layer_type)  # fmt: skip
    theirs = shaken(ResNetModel(config).encoder).eval()
    for own, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        own.copy_(other)
    for side in (16, 15):
        values = draw(2, 8, side, side)
        torch.testing.assert_close(ours(values), theirs(values).last_hidden_state)


@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize("name", ["resnet-9", "resnet-50"])
def test_a_resnet_takes_images_of_any_size(name, side):
    model = shaken(RESNETS[name](7))
    shapes: list[torch.Size] = []
    model.stages.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    assert without_gradient(model, draw(2, 3, side, side)) == []
    assert shapes == [(2, model.head.in_features, side // 8, side // 8)]


def test_a_resnet_reads_the_mean_over_all_pixels():
    model = RESNET_9(7).double().eval()
    images = draw(2, 3, 40, 24)
    maps = model.stages(model.stem(images))
    torch.testing.assert_close(model(images), model.head(functional.adaptive_avg_pool2d(maps, 1).flatten(1)))


def test_channels_last_training_does_not_crash():
    """In a process of its own: with strided 1x1 convolutions torch 2.13 ends by a segmentation fault."""
    process = small_process.CONTEXT.Process(target=small_process.train_channels_last)
    process.start()
    process.join()
    assert process.exitcode == 0


# The gate


def test_switch_norm_by_hand():
    """Of [1, 3] and [5, 11]: own means 2, 8 and variances 1, 9; over the batch means 3, 7 and variances 4, 16.

    With shares 1/4 (own) and 3/4 the means are [2.75, 5.75], [4.25, 7.25]; with shares 1/2 the variances are
    [2.5, 8.5], [6.5, 12.5]. Running: 0.1 of the batch's means; 0.9 + 0.1 of its unbiased variances, 8 and 32.
    """
    norm = SwitchNorm(2).double()
    x, mean, var = torch.tensor(
        [[[1, 3], [5, 11]], [[2.75, 5.75], [4.25, 7.25]], [[2.5, 8.5], [6.5, 12.5]]], dtype=torch.float64
    )
    norm.mean_weight.data = torch.tensor([1, 3]).double().log()
    norm.weight.data, norm.bias.data = torch.tensor([[2, 3], [0.5, -1]]).double()
    expected = (x - mean) / (var + 1e-5).sqrt() * torch.tensor([2, 3]) + torch.tensor([0.5, -1])
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.3, 0.7]).double())
    torch.testing.assert_close(norm.running_var, torch.tensor([1.7, 4.1]).double())


@pytest.mark.parametrize("kind", [0, 1])
def test_switch_norm_that_has_chosen_is_layer_or_batch_norm(kind):
    norm, batch_norm = SwitchNorm(6).double(), nn.BatchNorm1d(6).double()
    for weight in (norm.mean_weight, norm.var_weight):
        weight.data = torch.eye(2, dtype=torch.float64)[kind] * 100
    for training in (True, False):
        x = draw(5, 6, seed=training) * 3 + 1
        expected = batch_norm.train(training)(x) if kind else functional.layer_norm(x, (6,))
        torch.testing.assert_close(norm.train(training)(x), expected)


def test_a_gate_layer_by_layer():
    """FedMoE, Fig. 3: switch norm, linear, batch norm, sigmoid, linear, batch norm, softmax."""
    gate, images = shaken(Gate(3 * 8 * 8, hidden=5)), draw(6, 3, 8, 8)

    def normalised(values: Tensor, norm: nn.BatchNorm1d) -> Tensor:
        return (values - values.mean(0)) / (values.var(0, correction=0) + 1e-5).sqrt() * norm.weight + norm.bias

    hidden = 1 / (1 + (-normalised(gate.norm(images.reshape(6, 192)) @ gate.fc1.weight.T, gate.norm1)).exp())
    scores = normalised(hidden @ gate.fc2.weight.T, gate.norm2).exp()
    torch.testing.assert_close(gate(images), scores / scores.sum(1, keepdim=True))


def test_a_gate_in_evaluation_does_not_look_at_other_images():
    gate, images = shaken(Gate(3 * 8 * 8)).eval(), draw(4, 3, 8, 8)
    before = {name: value.clone() for name, value in gate.state_dict().items()}
    torch.testing.assert_close(gate(images), torch.cat([gate(image[None]) for image in images]))
    assert all(torch.equal(value, before[name]) for name, value in gate.state_dict().items())


def test_a_gate_trains_on_one_image_by_its_running_statistics():
    gate, image = shaken(Gate(3 * 8 * 8)), draw(1, 3, 8, 8)
    before = {name: value.clone() for name, value in gate.named_buffers()}
    assert without_gradient(gate.train(), image) == []
    torch.testing.assert_close(gate(image), gate.eval()(image))
    assert all(torch.equal(value, before[name]) for name, value in gate.named_buffers())


def test_a_gate_in_training_learns_but_for_a_shift_that_batch_norm_takes_out():
    assert without_gradient(shaken(Gate(3 * 8 * 8)), draw(6, 3, 8, 8)) == ["norm.bias"]


def test_a_gate_under_autocast_still_sums_to_one():
    gate = Gate(3 * 8 * 8)
    for count in (6, 1):
        with torch.autocast("cpu", torch.bfloat16):
            weights = gate(draw(count, 3, 8, 8, dtype=torch.float32))
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.sum(1), torch.ones(count))


def test_every_architecture_is_drawn_anew_by_its_modules():
    """`reset_parameters` of all modules leaves nothing as it was, statistics included; equal seeds draw alike."""
    for model in (CNNS["cnn-5"](3), RESNET_9(7), RESNETS["resnet-50"](7), Gate(3 * 8 * 8)):
        shaken(model)
        draws = []
        for seed in (1, 1, 2):
            before = {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                for module in model.modules():
                    if callable(reset := getattr(module, "reset_parameters", None)):
                        reset()
            if not draws:
                assert not [name for name, value in before.items() if torch.equal(value, model.state_dict()[name])]
            draws.append(torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()]))
        assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
