from torchmuster.train.world import World, all_gather_object, sum_over_ranks


def say_and_add(world: World, words: list[str]) -> tuple[list[str], list[float]]:
    said = all_gather_object({"word": words[world.global_rank]}, world)
    return [one["word"] for one in said], sum_over_ranks([1.0, world.global_rank], world)
