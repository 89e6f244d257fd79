"""assert_each_sample_once: outside a worker by a call of its own, inside by the real ranks."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from distsdk import UsageError, distributed
from distsdk.testing import assert_each_sample_once
from tests.testing.programs import Stream, loader, network


def failure(*arguments, **named):
    with pytest.raises(AssertionError) as caught:
        assert_each_sample_once(*arguments, **named)
    return str(caught.value)


def test_divisible_lengths():
    shuffled = loader(48, shuffle=True, generator=torch.Generator().manual_seed(1))
    before = shuffled.generator.get_state()
    assert_each_sample_once(shuffled)
    assert torch.equal(shuffled.generator.get_state(), before)
    assert_each_sample_once(loader(48, sampler=SubsetRandomSampler(range(1, 48, 2))), workers=3)
    assert_each_sample_once(loader(batch_size=None, length=10, sampler=SequentialSampler(range(10))))


def test_a_padded_length():
    text = failure(loader(50), workers=3)
    assert text.startswith(
        "the 3 ranks do not share the 50 samples of the loader exactly: "
        "1 dealt too often: index 0 (ranks 0 and 2 have it); 0 never dealt. Remedies: "
    )
    assert all(remedy in text for remedy in ("divides by the number of workers", "drop_last=True", 'batch="global"'))


def test_remedies():
    assert_each_sample_once(loader(49, drop_last=True))
    for length in (50, 17, 9):  # an incomplete last batch, of one sample
        assert_each_sample_once(loader(length), workers=3, batch="global")
    batches = BatchSampler(SequentialSampler(range(50)), 8, drop_last=True)
    data = loader(50).dataset
    assert_each_sample_once(DataLoader(data, batch_sampler=batches), batch="global")
    assert_each_sample_once(DataLoader(data, batch_sampler=batches))


def test_samples_with_replacement():
    sampler = WeightedRandomSampler([1.0] + [0.0] * 11, 12)
    text = failure(loader(12, sampler=sampler, batch_size=2))
    assert "1 dealt too often: index 0 (ranks 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1 and 1 have it)" in text
    assert "11 never dealt: index 1, index 2, index 3, index 4, index 5, ...." in text


@pytest.mark.parametrize("batch", ["per_worker", "global"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams(batch, num_workers):
    """Two loader processes of a stream that does not divide itself between them read it twice."""
    stream = DataLoader(Stream(12), batch_size=3, num_workers=num_workers)
    if not num_workers:
        return assert_each_sample_once(stream, batch=batch)
    text = failure(stream, batch=batch)
    assert "the 12 samples of the loader exactly: 12 dealt too often: item tensor([0, 1]) [" in text
    return None


def test_inside_a_worker():
    """The models are in eval mode, the loaders are ordinary ones: it is about training all the same."""

    @distributed(workers=2, gpu=False, logs="none", trackers=())
    def look():
        model = network().eval()
        texts = []
        with torch.no_grad():
            for data in (loader(48), loader(49), DataLoader(Stream(8), 2), loader(batch_size=None)):
                try:
                    assert_each_sample_once(data)
                    texts.append("")
                except AssertionError as error:
                    texts.append(str(error))
        return texts, model.training

    (texts, is_training), (others, _) = look().values
    assert texts == others
    assert not is_training
    assert [bool(text) for text in texts] == [False, True, False, False]
    assert "index 0 (ranks 0 and 1 have it)" in texts[1]


def test_loaders_that_are_left_alone():
    @distributed(workers=2, gpu=False, logs="none", trackers=(), wrap=False)
    def look():
        assert_each_sample_once(loader(48))

    with pytest.raises(AssertionError, match="48 dealt too often: index 0 .ranks 0 and 1 have it."):
        look()


def test_what_is_refused():
    with pytest.raises(UsageError, match="takes a torch DataLoader, not a list"):
        assert_each_sample_once([1, 2])
    with pytest.raises(UsageError, match="batch='single'"):
        assert_each_sample_once(loader(), batch="single")
    with pytest.raises(UsageError, match="has no length"):
        assert_each_sample_once(DataLoader(Endless(), sampler=range(4)))


class Endless(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return index
