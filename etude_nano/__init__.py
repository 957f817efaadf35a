"""Nano tasks: coding work in miniature, for models of a few million parameters and for tests.

    nano_task(seed, split, difficulty)      the files of one task directory; source.py says what the difficulties are
    generate_nano(out, count, split)        a set of them on disk
    expert(files, seed)                     the turns of an agent that knows the answer
    render_experts(tasks, dialect, fleet)   those turns in the real harness and real pods, graded
    rehearse(files, dialect)                the same tokens without pods, for a great many demonstrations
    vocabulary_texts(count)                 what to train the tokenizer on

The code comes out of four books of shapes (`book_*.py`) and pools of words; what is wrong in it, or asked for, out of
fifteen families (`fixing.py`, `changing.py`, `asking.py`). `inside/verify.py` is the verifier of every task.
"""
