"""A training function that knows nothing of distsdk, on one worker and on two.

Everything is made inside the function: the data, the model, the loader and the optimizer. All of it takes part without
a change, because a worker sees models and loaders when they are made. With two workers, the batch size of the loader
is each worker's own, as in torch's `DistributedSampler`: the gradient of a step is that of 2 x 16 samples.

What the function returns on each worker is in `result.values`. Here that is the model itself.
"""

import torch
from sklearn.datasets import load_iris
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distsdk import distributed


def flowers():
    features, species = load_iris(return_X_y=True)
    features = torch.tensor(features, dtype=torch.float32)
    return TensorDataset((features - features.mean(0)) / features.std(0), torch.tensor(species))


def train(epochs=40):
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(flowers(), batch_size=16, shuffle=True)
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for features, species in loader:
            optimizer.zero_grad()
            criterion(model(features), species).backward()
            optimizer.step()
    return model


def accuracy(model):
    features, species = flowers().tensors
    return (model(features).argmax(1) == species).float().mean().item()


untrained = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
print(f"an untrained model: accuracy {accuracy(untrained):.1%}")

for workers in (1, 2):
    result = distributed(workers=workers)(train)()
    print(f"{workers} worker(s): accuracy {accuracy(result.value):.1%}")

first, second = result.values
equal = all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
print(f"the weights of the two workers are {'equal, bit by bit' if equal else 'NOT equal'}")
