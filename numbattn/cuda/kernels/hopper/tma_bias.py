"""A bias whose tiles TMA loads, one for each consumer: see `scores.number_of_tma_bias`."""

from ...tile import allocate, device, tma_load_part


def load_bias_step(SHARED_B, consumers, place_of):
    """The producer's device function (stage, biases, at): load the tiles of all consumers, which fill this stage.

    place_of: the device function (consumer, at) -> the batch, head, row and column where a consumer's tile starts.
    SHARED_B: places, one for each stage and consumer.
    """
    CONSUMERS = consumers

    @device
    def load_bias(stage, biases, at):
        for consumer in range(CONSUMERS):
            batch, head, row, col = place_of(consumer, at)
            place = allocate(SHARED_B, stage.index * CONSUMERS + consumer)
            tma_load_part(stage, place, biases[0], batch, head, row, col)

    return load_bias
