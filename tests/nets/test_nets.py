import functools
import math
import multiprocessing
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redgrape import nets
from redgrape.errors import ConfigError
from redgrape.nets import resnet

DIGIT = (1, 28, 28)
PHOTO = (3, 32, 32)
IMAGE_NETS = sorted(nets.SHORTEST_SIDE)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "num_classes", "parameters"),
    [
        ("cnn", DIGIT, 10, 1_663_370),
        ("cnn_dropout", DIGIT, 10, 1_199_882),
        ("resnet8", PHOTO, 10, 75_290),
        ("resnet20", PHOTO, 10, 269_722),
        ("resnet32", PHOTO, 10, 464_154),
        ("resnet56", PHOTO, 10, 853_018),
        ("resnet56", PHOTO, 100, 858_868),
        ("resnet8x4", PHOTO, 10, 1_227_594),
        ("resnet56_bottleneck", PHOTO, 10, 591_322),
        ("resnet56_bottleneck", PHOTO, 100, 614_452),
        ("mlp", (784,), 10, 109_386),
        ("linear", (784,), 10, 7_850),
    ],
)
def test_parameter_counts_are_those_of_the_docstrings(name, shape, num_classes, parameters):
    assert count(nets.build(name, shape, num_classes, seed=0)) == parameters
    assert f"{parameters:,}" in nets.NETS[name].__doc__


def test_basic_resnet_counts_by_hand():
    """Of a basic block from i to o channels: 9io + 9oo weights and 4o of two BatchNorms; option B adds io + 2o."""

    def block(i, o):
        return 9 * i * o + 9 * o * o + 4 * o

    def he(n):
        stages = sum(block(i, o) + (n - 1) * block(o, o) for i, o in [(16, 16), (16, 32), (32, 64)])
        return 9 * 3 * 16 + 2 * 16 + stages + 65 * 10

    assert [he(n) for n in (1, 3, 5, 9)] == [75_290, 269_722, 464_154, 853_018]

    projections = (64 * 128 + 2 * 128) + (128 * 256 + 2 * 256)
    wide = 9 * 3 * 64 + 2 * 64 + block(64, 64) + block(64, 128) + block(128, 256) + projections + 257 * 10
    assert wide == 1_227_594


FEATURES = {
    "cnn": 512,
    "cnn_dropout": 128,
    "mlp": 64,
    "resnet8": 64,
    "resnet20": 64,
    "resnet32": 64,
    "resnet56": 64,
    "resnet8x4": 256,
    "resnet56_bottleneck": 256,
}


@pytest.mark.parametrize("shape", [DIGIT, PHOTO, (3, 20, 36)], ids=str)
@pytest.mark.parametrize("name", nets.NETS)
def test_forward_shapes(name, shape):
    net = nets.build(name, shape, 7, seed=0).eval()
    x = torch.randn(2, *shape)
    features = net.encoder(x)
    assert features.shape == (2, FEATURES.get(name, math.prod(shape)))
    assert net(x).shape == (2, 7)
    assert torch.equal(net(x), net.classifier(features))


@pytest.mark.parametrize("name", nets.NETS)
def test_one_seed_gives_equal_nets_that_share_no_memory(name):
    first, second, other = (nets.build(name, PHOTO, 10, seed).state_dict() for seed in (3, 3, 4))
    assert first.keys() == second.keys() == other.keys()
    assert all(key.startswith(("encoder.", "classifier.")) for key in first)
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key])
        assert tensor.data_ptr() != second[key].data_ptr()
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])


@pytest.mark.parametrize("name", nets.NETS)
def test_the_global_stream_is_neither_used_nor_moved(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = nets.build(name, PHOTO, 10, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    two = nets.build(name, PHOTO, 10, seed=0)
    assert torch.equal(one.classifier.weight, two.classifier.weight)


@pytest.mark.parametrize("name", nets.NETS)
def test_one_step_on_two_examples_stays_finite_and_moves_every_parameter(name):
    torch.manual_seed(0)
    net = nets.build(name, PHOTO, 10, seed=0).train()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    F.cross_entropy(net(torch.randn(2, *PHOTO)), torch.tensor([1, 8])).backward()
    optimizer.step()
    assert all(torch.isfinite(t).all() for t in net.state_dict().values())
    assert not any(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("name", IMAGE_NETS)
def test_the_smallest_image_trains_even_alone(name):
    side = nets.SHORTEST_SIDE[name]
    net = nets.build(name, (1, side, side + 1), 3, seed=0).train()
    assert net(torch.randn(1, 1, side, side + 1)).isfinite().all()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", IMAGE_NETS)
def test_a_smaller_image_could_not_train(name):
    side = nets.SHORTEST_SIDE[name] - 1
    with pytest.raises((RuntimeError, ValueError)):
        nets.NETS[name]((1, side, side), 3).train()(torch.randn(1, 1, side, side))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("cnn", "Conv2d MaxPool2d ReLU Conv2d MaxPool2d ReLU Flatten Linear ReLU"),
        ("cnn_dropout", "Conv2d ReLU Conv2d MaxPool2d ReLU Dropout Flatten Linear ReLU Dropout"),
        ("mlp", "Flatten Linear ReLU Linear ReLU"),
    ],
)
def test_the_layers_in_their_order(name, layers):
    encoder = nets.build(name, DIGIT, 10, seed=0).encoder
    assert [type(layer).__name__ for layer in encoder] == layers.split()
    dropped = [layer.p for layer in encoder if isinstance(layer, nn.Dropout)]
    assert dropped == ([0.25, 0.5] if name == "cnn_dropout" else [])


def test_the_encoder_of_linear_only_flattens():
    net = nets.build("linear", (2, 3), 4, seed=0)
    x = torch.randn(5, 2, 3)
    assert count(net.encoder) == 0
    assert torch.equal(net.encoder(x), x.reshape(5, 6))


def shortcuts(name: str) -> list[nn.Module]:
    """The shortcuts that change a shape."""
    blocks = [m for m in nets.build(name, PHOTO, 10, seed=0).modules() if isinstance(m, resnet._Block)]
    return [b.shortcut for b in blocks if not isinstance(b.shortcut, nn.Identity)]


@pytest.mark.parametrize("name", ["resnet8", "resnet20", "resnet32", "resnet56"])
def test_option_a_shortcuts_have_no_parameters(name):
    assert len(shortcuts(name)) == 2
    assert all(count(shortcut) == 0 for shortcut in shortcuts(name))


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet8x4", [8448, 33280]), ("resnet56_bottleneck", [1152, 8448, 33280])]
)
def test_option_b_shortcuts_are_1x1_convolutions(name, parameters):
    assert [count(shortcut) for shortcut in shortcuts(name)] == parameters


def test_option_a_takes_every_second_pixel_between_zero_channels():
    x = torch.arange(2 * 3 * 5, dtype=torch.float32).reshape(1, 2, 3, 5)
    y: Tensor = shortcuts("resnet8")[0](x.repeat(1, 8, 1, 1))
    assert y.shape == (1, 32, 2, 3)
    assert not y[:, :8].any()
    assert not y[:, 24:].any()
    assert torch.equal(y[0, 8], torch.tensor([[0.0, 2, 4], [10, 12, 14]]))


def test_option_a_passes_the_gradient_on_in_its_memory_format():
    """Channels last: in another format, the sums and ReLUs of all blocks before it would be slow."""
    x = torch.randn(2, 16, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    y: Tensor = shortcuts("resnet8")[0](x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(gradient[:, :, ::2, ::2], 2 * x.detach()[:, :, ::2, ::2])
    assert gradient.count_nonzero() == 2 * 16 * 9


@pytest.mark.parametrize(("name", "fan"), [("resnet56", "in"), ("resnet8x4", "out"), ("resnet56_bottleneck", "out")])
def test_convolutions_start_normal_with_variance_two_over_fan(name, fan):
    net = nets.build(name, PHOTO, 10, seed=0)
    wide = [m for m in net.modules() if isinstance(m, nn.Conv2d) and m.in_channels != m.out_channels]
    for conv in wide:
        channels = conv.in_channels if fan == "in" else conv.out_channels
        scaled = conv.weight * math.sqrt(channels * math.prod(conv.kernel_size) / 2)
        assert scaled.std().item() == pytest.approx(1, abs=5 / math.sqrt(2 * scaled.numel()))


def test_classifiers_start_as_their_authors_start_them():
    """PyTorch's default is uniform within 1/sqrt(d); He's nets as in LDAM are normal with variance 2/d."""
    for name in nets.NETS:
        weight = nets.build(name, PHOTO, 100, seed=0).classifier.weight
        largest = weight.abs().max().item() * math.sqrt(weight.shape[1])
        assert (largest > 3) == (name in {"resnet8", "resnet20", "resnet32", "resnet56"})
        assert largest > 0.98


def classifier_of(build) -> Tensor:
    return build().classifier.weight.detach().clone()


def test_build_works_in_another_process():
    build = functools.partial(nets.build, "resnet8", PHOTO, 10, seed=5)
    assert pickle.loads(pickle.dumps(build)).keywords == build.keywords
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.apply(classifier_of, (build,))
    assert torch.equal(there, classifier_of(build))


def test_unknown_names():
    with pytest.raises(ConfigError, match=r"^unknown net 'resnet9'; did you mean 'resnet\d+'\?$"):
        nets.build("resnet9", PHOTO, 10, seed=0)


@pytest.mark.parametrize("name", IMAGE_NETS)
def test_an_image_net_refuses_vectors(name):
    side = nets.SHORTEST_SIDE[name]
    with pytest.raises(ConfigError) as error:
        nets.build(name, (20,), 10, seed=0)
    assert str(error.value) == (
        f"net '{name}' needs images of at least {side}x{side} pixels, but examples are 20; choose from linear, mlp"
    )


def test_an_image_net_refuses_small_images_and_says_which_nets_fit():
    with pytest.raises(ConfigError) as error:
        nets.build("cnn_dropout", (1, 8, 4), 10, seed=0)
    assert str(error.value) == (
        "net 'cnn_dropout' needs images of at least 6x6 pixels, but examples are 1x8x4; choose from cnn, linear, mlp"
    )


def test_nets_for_a_shape():
    assert nets.nets_for(PHOTO) == list(nets.NETS)
    assert nets.nets_for((20,)) == nets.nets_for((28, 28)) == ["linear", "mlp"]


def test_every_net_has_its_own_name_and_one_line():
    assert all(name == net.__name__ for name, net in nets.NETS.items())
    lines = [(net.__doc__ or "").partition("\n")[0] for net in nets.NETS.values()]
    assert len(set(lines)) == len(nets.NETS)
    assert all(10 < len(line) < 90 and line[-1] != "." for line in lines)
