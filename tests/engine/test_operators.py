"""What is counted of operators, by hand."""

import torch

from engine.operators import OperatorCounter

SIZE = 32


def test_bytes_are_those_of_operands_and_results_and_views_are_free() -> None:
    left, right = torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE)
    whole = left.nbytes
    with OperatorCounter() as counter:
        torch.relu(left[:, : SIZE // 2])
        left.add_(right)
        torch.mm(left, right.view(-1).view(SIZE, SIZE).t())
        torch.empty(SIZE, SIZE)
    assert counter.kernels == {"product": 1, "attention": 0, "other": 2}
    assert counter.bytes == {"product": 3 * whole, "attention": 0, "other": 2 * whole // 2 + 3 * whole}
    assert counter.flops == {"product": 2 * SIZE**3, "attention": 0, "other": 0}


def test_a_lookup_reads_what_it_writes_and_an_expanded_tensor_is_as_large_as_it_is() -> None:
    table, row = torch.ones(1000, 8), torch.ones(1, 8)
    with OperatorCounter() as counter:
        found = torch.nn.functional.embedding(torch.arange(4), table)
        found + row.expand(4, 8)
    index = 4 * 8  # arange's
    assert counter.bytes["other"] == index + 2 * found.nbytes + (2 * found.nbytes + row.nbytes)
