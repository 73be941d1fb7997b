"""Small convolutional nets for small images, with PyTorch's default initialisation."""

from __future__ import annotations

from torch import nn

from redgrape.nets.net import Net


def cnn(shape: tuple[int, ...], num_classes: int) -> Net:
    """two 5x5 convolutions and 512 features, of FedAvg (McMahan et al. 2017)

    For 1x28x28 and 10 classes: 832 + 51,264 + 1,606,144 + 5,130 = 1,663,370 parameters.
    """
    channels, height, width = shape
    encoder = nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.MaxPool2d(2),  # before the ReLU, with which it commutes: a quarter of the work, equal values and gradients
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(inplace=True),
    )
    return Net(encoder, nn.Linear(512, num_classes))


def cnn_dropout(shape: tuple[int, ...], num_classes: int) -> Net:
    """two 3x3 convolutions, dropout and 128 features, of FedOpt (Reddi et al. 2021)

    RedGrape's released code runs this one on MNIST.
    For 1x28x28 and 10 classes: 320 + 18,496 + 1,179,776 + 1,290 = 1,199,882 parameters.
    """
    channels, height, width = shape
    encoder = nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),  # each unpadded 3x3 takes two pixels off a side
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
    )
    return Net(encoder, nn.Linear(128, num_classes))
