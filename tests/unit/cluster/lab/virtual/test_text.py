from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, load_text
from cluster.lab.virtual.text import virtual_text

TEXT = "1. Practise daily: even ten minutes a day help more than an hour a week."


def test_folded_text_has_the_counts_of_the_large_tokenizer_and_ids_of_the_small_model() -> None:
    large, small = load_text(LLAMA_TOKENIZER), load_text(str(checkpoint_path()))
    folded = virtual_text()

    assert len(folded.encode(TEXT)) == len(large.encode(TEXT))
    chat = [ChatMessage("user", TEXT)]
    assert len(folded.encode_chat(chat)) == len(large.encode_chat(chat))
    control = {small.tokens.fork_id, small.tokens.child_id, small.tokens.end_id}
    assert folded.tokens == small.tokens
    assert control.isdisjoint(folded.encode(TEXT))
    assert all(8 <= token_id < 4096 for token_id in folded.encode(TEXT))
