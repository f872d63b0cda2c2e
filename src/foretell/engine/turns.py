"""Who takes part in a step that has too few rows for all."""

from __future__ import annotations

from collections.abc import Sequence

from foretell.engine.sequence import DecodingSequence


def take_turns(sequences: Sequence[DecodingSequence], max_rows: int | None) -> list[DecodingSequence]:
    """Return those that take part, in the order given: all, or the `max_rows` most urgent.

    Urgent is a high priority, and every step waited counts as much as one more of it: nobody waits for more steps than
    priorities differ and sequences are there.
    """
    if max_rows is None or len(sequences) <= max_rows:
        chosen = list(sequences)
    else:
        by_urgency = sorted(sequences, key=lambda each: each.request.priority + each.num_waited, reverse=True)
        places = set(map(id, by_urgency[:max_rows]))
        chosen = [each for each in sequences if id(each) in places]
        for sequence in sequences:
            sequence.num_waited += 1
    for sequence in chosen:
        sequence.num_waited = 0
    return chosen
