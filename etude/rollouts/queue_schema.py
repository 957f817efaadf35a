"""The tables of the rollout queue, and the policy step that a weight version counts as.

The trainer can go back to a checkpoint; the weights since then are a lost lineage. A lost version counts as the policy
step that is as many updates before the checkpoint as the version was after it, so that staleness is the number of
updates between the weights that sampled a token and those that train on it: back to the checkpoint, then forward.
"""

SCHEMA = """
CREATE TABLE IF NOT EXISTS plan (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY,
    task TEXT NOT NULL,
    use INTEGER NOT NULL DEFAULT 1,      -- counts the groups of this prompt
    expected REAL NOT NULL DEFAULT 0,    -- expected seconds: long groups start early
    step INTEGER,                        -- policy step that consumed it; NULL: none yet
    informative INTEGER,                 -- 1: its rewards differ; 0: they are alike; NULL: not judged yet
    dropped TEXT,                        -- why it will never be trained
    UNIQUE (task, use)
);
CREATE TABLE IF NOT EXISTS slots (
    id INTEGER PRIMARY KEY,
    grp INTEGER NOT NULL REFERENCES groups(id),
    number INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'queued',
    attempt INTEGER NOT NULL DEFAULT 0,  -- counts claims; the fencing token of the current one
    failures INTEGER NOT NULL DEFAULT 0,
    worker TEXT NOT NULL DEFAULT '',
    lease REAL NOT NULL DEFAULT 0,       -- when the claim expires
    oldest INTEGER,                      -- policy steps that sampled its tokens; before that, a lower bound
    newest INTEGER,
    reward TEXT,                         -- JSON
    trace TEXT NOT NULL DEFAULT '',
    resume TEXT NOT NULL DEFAULT '',     -- a rollout checkpoint: JSON
    note TEXT NOT NULL DEFAULT '',
    UNIQUE (grp, number)
);
CREATE TABLE IF NOT EXISTS versions (
    number INTEGER PRIMARY KEY,          -- weight version: only ever grows, also across restarts
    step INTEGER NOT NULL                -- policy step of those weights
);
CREATE TABLE IF NOT EXISTS rewinds (     -- the trainer went back to `step` after it had published `version`
    version INTEGER NOT NULL,
    step INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS troubles (     -- written by triggers, so that no change can omit it
    id INTEGER PRIMARY KEY,
    grp INTEGER NOT NULL REFERENCES groups(id),
    number INTEGER,                      -- of the slot; NULL: the whole group
    kind TEXT NOT NULL,
    why TEXT NOT NULL,
    step INTEGER                         -- last trained step at that time; NULL: none
);
CREATE TRIGGER IF NOT EXISTS slot_failed AFTER UPDATE OF failures ON slots WHEN NEW.failures > OLD.failures BEGIN
    INSERT INTO troubles (grp, number, kind, why, step) SELECT NEW.grp, NEW.number,
        CASE NEW.note WHEN 'its lease expired' THEN 'lost' ELSE 'failed' END, NEW.note, MAX(step) FROM groups;
END;
CREATE TRIGGER IF NOT EXISTS slot_stale AFTER UPDATE OF state ON slots
WHEN OLD.state = 'ready' AND NEW.state = 'queued' BEGIN
    INSERT INTO troubles (grp, number, kind, why, step)
    SELECT NEW.grp, NEW.number, 'stale', NEW.note, MAX(step) FROM groups;
END;
CREATE TRIGGER IF NOT EXISTS group_dropped AFTER UPDATE OF dropped ON groups
WHEN OLD.dropped IS NULL AND NEW.dropped IS NOT NULL BEGIN
    INSERT INTO troubles (grp, kind, why, step) SELECT NEW.id, 'dropped', NEW.dropped, MAX(step) FROM groups;
END;
CREATE INDEX IF NOT EXISTS slots_by_state ON slots (state, grp);
"""

# The newest policy step that a version shares with the trainer's present weights, and the step that it counts as.
SHARED_STEP = "MIN(v.step, COALESCE((SELECT MIN(r.step) FROM rewinds r WHERE r.version >= v.number), v.step))"
STEP_OF = f"2 * {SHARED_STEP} - v.step"
OLDEST_STEP = f"(SELECT MIN({STEP_OF}) FROM versions v WHERE v.number BETWEEN %s AND %s)"
# The weight versions between which a finished rollout was sampled.
FIRST_VERSION, LAST_VERSION = (f"json_extract(reward, '$.versions[{index}]')" for index in (0, 1))
