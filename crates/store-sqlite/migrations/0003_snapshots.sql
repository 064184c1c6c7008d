-- Snapshots, and which session another one was made from. No reference to the session: a snapshot outlives it. `doc` is
-- the whole row as JSON; `gone_at` is when it was deleted, or begun in vain, and says when it may be forgotten.
CREATE TABLE snapshots (
    id TEXT NOT NULL PRIMARY KEY,
    revision INTEGER NOT NULL,
    session_id TEXT NOT NULL,
    owner_token TEXT,
    name TEXT,
    state TEXT NOT NULL,
    keep_until INTEGER,
    gone_at INTEGER,
    doc TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX snapshots_name ON snapshots (name) WHERE name IS NOT NULL AND state IN ('taking', 'ready');
CREATE INDEX snapshots_session ON snapshots (session_id, id);
CREATE INDEX snapshots_owner ON snapshots (owner_token, id) WHERE owner_token IS NOT NULL;
CREATE INDEX snapshots_due ON snapshots (keep_until) WHERE keep_until IS NOT NULL AND state IN ('ready', 'failed');
CREATE INDEX snapshots_gone ON snapshots (gone_at) WHERE gone_at IS NOT NULL;

ALTER TABLE sessions ADD COLUMN parent_session TEXT;
-- A damaged record stays as it is and has no parent.
UPDATE sessions SET parent_session = json_extract(doc, '$.parent_session') WHERE json_valid(doc);
CREATE INDEX sessions_parent ON sessions (parent_session, id) WHERE parent_session IS NOT NULL;
