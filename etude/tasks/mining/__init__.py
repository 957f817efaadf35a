"""Mining: benchmark tasks from the real changes of a repository's history.

history ──▶ classify ──▶ environment of the parent ──▶ tests before and after ──▶ request ──▶ mutations ──▶ task
changes     or reason    by etude.tasks.installation   three times each           interface   of the        validated
                                                       in offline pods            note        reference
"""
