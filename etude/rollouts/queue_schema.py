"""The tables of the rollout queue, and the policy step that a weight version counts as.

The trainer can go back to a checkpoint; the weights since then are a lost lineage. A lost version counts as the policy
step that is as many updates before the checkpoint as the version was after it, so that staleness is the number of
updates between the weights that sampled a token and those that train on it: back to the checkpoint, then forward.
"""

VERSION = 2  # of these tables

SCHEMA = """
CREATE TABLE plan (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    task TEXT NOT NULL,
    use INTEGER NOT NULL DEFAULT 1,      -- counts the groups of this prompt
    expected REAL NOT NULL DEFAULT 0,    -- expected seconds: long groups start early
    step INTEGER,                        -- policy step that consumed it; NULL: none yet
    informative INTEGER,                 -- 1: its rewards differ; 0: they are alike; NULL: not judged yet
    dropped TEXT,                        -- why it will never be trained
    changed INTEGER NOT NULL DEFAULT 0   -- number of its last change, over all groups
);
CREATE TABLE slots (
    id INTEGER PRIMARY KEY,
    grp INTEGER NOT NULL REFERENCES groups(id),
    number INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'queued',
    attempt INTEGER NOT NULL DEFAULT 0,  -- counts claims; the fencing token of the current one
    failures INTEGER NOT NULL DEFAULT 0,
    worker TEXT NOT NULL DEFAULT '',     -- that has claimed it
    session TEXT NOT NULL DEFAULT '',    -- of that worker, and the number of its request
    request INTEGER NOT NULL DEFAULT 0,
    lease REAL NOT NULL DEFAULT 0,       -- when the claim expires; 0: not claimed
    oldest INTEGER,                      -- policy steps that sampled its tokens; before that, a lower bound
    newest INTEGER,
    reward TEXT,                         -- JSON
    trace TEXT NOT NULL DEFAULT '',
    resume TEXT NOT NULL DEFAULT '',     -- a rollout checkpoint: JSON
    note TEXT NOT NULL DEFAULT '',
    fate TEXT NOT NULL DEFAULT 'open',   -- of its group: open, trained, dropped
    started INTEGER NOT NULL DEFAULT 0,  -- whether a slot of its group was claimed
    expected REAL NOT NULL DEFAULT 0,    -- of its group
    UNIQUE (grp, number)
);
CREATE TABLE tally (       -- slots by state; those of trained and dropped groups by that
    name TEXT PRIMARY KEY,
    slots INTEGER NOT NULL
);
CREATE TABLE figures (     -- of groups: outstanding
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
);
INSERT INTO figures VALUES ('outstanding', 0);
CREATE TABLE workers (     -- the present process of each worker
    name TEXT PRIMARY KEY,
    session TEXT NOT NULL
);
CREATE TABLE versions (
    number INTEGER PRIMARY KEY,          -- weight version: only ever grows, also across restarts
    step INTEGER NOT NULL                -- policy step of those weights
);
CREATE TABLE rewinds (     -- the trainer went back to `step` after it had published `version`
    version INTEGER NOT NULL,
    step INTEGER NOT NULL
);
CREATE TABLE troubles (     -- written by triggers, so that no change can omit it
    id INTEGER PRIMARY KEY,
    grp INTEGER NOT NULL REFERENCES groups(id),
    number INTEGER,                      -- of the slot; NULL: the whole group
    kind TEXT NOT NULL,
    why TEXT NOT NULL,
    step INTEGER                         -- last trained step at that time; NULL: none
);
"""

# Groups that may still be trained on.
OUTSTANDING = "step IS NULL AND dropped IS NULL AND informative IS NOT 0"
LAST_STEP = "(SELECT MAX(step) FROM groups WHERE step IS NOT NULL)"
_NEXT_CHANGE = "(SELECT MAX(changed) + 1 FROM groups)"
_WAS, _IS = (f"({row}.step IS NULL AND {row}.dropped IS NULL AND {row}.informative IS NOT 0)" for row in ("OLD", "NEW"))

# What queries would otherwise count or scan is kept by triggers: they see every change, whatever makes it.
TRIGGERS = f"""
CREATE TRIGGER slot_failed AFTER UPDATE OF failures ON slots WHEN NEW.failures > OLD.failures BEGIN
    INSERT INTO troubles (grp, number, kind, why, step) SELECT NEW.grp, NEW.number,
        CASE NEW.note WHEN 'its lease expired' THEN 'lost' ELSE 'failed' END, NEW.note, {LAST_STEP};
END;
CREATE TRIGGER slot_stale AFTER UPDATE OF state ON slots
WHEN OLD.state = 'ready' AND NEW.state = 'queued' BEGIN
    INSERT INTO troubles (grp, number, kind, why, step) SELECT NEW.grp, NEW.number, 'stale', NEW.note, {LAST_STEP};
END;
CREATE TRIGGER group_dropped AFTER UPDATE OF dropped ON groups
WHEN OLD.dropped IS NULL AND NEW.dropped IS NOT NULL BEGIN
    INSERT INTO troubles (grp, kind, why, step) SELECT NEW.id, 'dropped', NEW.dropped, {LAST_STEP};
END;
CREATE TRIGGER slot_added AFTER INSERT ON slots BEGIN
    INSERT INTO tally VALUES (NEW.state, 1) ON CONFLICT (name) DO UPDATE SET slots = slots + 1;
END;
CREATE TRIGGER slot_moved AFTER UPDATE OF state, fate ON slots
WHEN OLD.state != NEW.state OR OLD.fate != NEW.fate BEGIN
    UPDATE tally SET slots = slots - 1 WHERE name = CASE OLD.fate WHEN 'open' THEN OLD.state ELSE OLD.fate END;
    INSERT INTO tally VALUES (CASE NEW.fate WHEN 'open' THEN NEW.state ELSE NEW.fate END, 1)
        ON CONFLICT (name) DO UPDATE SET slots = slots + 1;
END;
CREATE TRIGGER slot_started AFTER UPDATE OF attempt ON slots WHEN OLD.attempt = 0 BEGIN
    UPDATE slots SET started = 1 WHERE grp = NEW.grp AND started = 0;
END;
CREATE TRIGGER group_closed AFTER UPDATE OF step, dropped ON groups BEGIN
    UPDATE slots SET fate = CASE WHEN NEW.dropped IS NOT NULL THEN 'dropped' WHEN NEW.step IS NOT NULL THEN 'trained'
                                 ELSE 'open' END WHERE grp = NEW.id;
END;
CREATE TRIGGER group_added AFTER INSERT ON groups BEGIN
    UPDATE figures SET value = value + 1 WHERE name = 'outstanding';
    UPDATE groups SET changed = {_NEXT_CHANGE} WHERE id = NEW.id;
END;
CREATE TRIGGER group_changed AFTER UPDATE OF task, step, informative, dropped ON groups BEGIN
    UPDATE groups SET changed = {_NEXT_CHANGE} WHERE id = NEW.id;
END;
CREATE TRIGGER group_judged AFTER UPDATE OF step, informative, dropped ON groups WHEN {_WAS} != {_IS} BEGIN
    UPDATE figures SET value = value + {_IS} - {_WAS} WHERE name = 'outstanding';
END;
CREATE TRIGGER slot_scored AFTER UPDATE OF state ON slots
WHEN (OLD.state = 'ready') != (NEW.state = 'ready') BEGIN
    UPDATE groups SET changed = {_NEXT_CHANGE} WHERE id = NEW.grp;
END;
"""

# Every query of a running queue uses one of these: its work does not grow with the number of groups that are done.
# Made whenever a queue is opened, if they are missing.
INDEXES = """
CREATE INDEX IF NOT EXISTS slots_to_claim ON slots (started DESC, attempt > 0 DESC, expected DESC, grp, number)
    WHERE state = 'queued' AND fate = 'open';
CREATE INDEX IF NOT EXISTS slots_by_worker ON slots (worker) WHERE worker != '';
CREATE INDEX IF NOT EXISTS slots_by_lease ON slots (lease) WHERE lease > 0;
CREATE INDEX IF NOT EXISTS slots_by_age ON slots (oldest) WHERE state = 'ready' AND fate = 'open';
CREATE INDEX IF NOT EXISTS slots_by_failures ON slots (failures) WHERE failures > 0 AND fate = 'open';
CREATE INDEX IF NOT EXISTS slots_by_snapshot ON slots (json_extract(resume, '$.snapshot'))
    WHERE resume != '' AND fate = 'open';
CREATE INDEX IF NOT EXISTS slots_open ON slots (grp) WHERE fate = 'open';
CREATE UNIQUE INDEX IF NOT EXISTS groups_by_task ON groups (task, use);
CREATE INDEX IF NOT EXISTS groups_open ON groups (informative) WHERE step IS NULL AND dropped IS NULL;
CREATE INDEX IF NOT EXISTS groups_judged ON groups (id) WHERE informative IS NOT NULL;
CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step) WHERE step IS NOT NULL;
CREATE INDEX IF NOT EXISTS groups_by_change ON groups (changed);
CREATE INDEX IF NOT EXISTS versions_by_step ON versions (step);
CREATE INDEX IF NOT EXISTS troubles_by_step ON troubles (COALESCE(step, 0));
"""

# The newest policy step that a version shares with the trainer's present weights, and the step that it counts as.
SHARED_STEP = "MIN(v.step, COALESCE((SELECT MIN(r.step) FROM rewinds r WHERE r.version >= v.number), v.step))"
STEP_OF = f"2 * {SHARED_STEP} - v.step"
OLDEST_STEP = f"(SELECT MIN({STEP_OF}) FROM versions v WHERE v.number BETWEEN %s AND %s)"
# The weight versions between which a finished rollout was sampled.
FIRST_VERSION, LAST_VERSION = (f"json_extract(reward, '$.versions[{index}]')" for index in (0, 1))
