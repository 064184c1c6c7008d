-- What the sessions of a token may take together: a JSON object, NULL where there is no limit. And which token made a
-- session, as a column, since they are counted by it.
ALTER TABLE tokens ADD COLUMN limits TEXT;
ALTER TABLE sessions ADD COLUMN owner_token TEXT;
-- A damaged record stays as it is and belongs to nobody.
UPDATE sessions SET owner_token = json_extract(doc, '$.owner_token') WHERE json_valid(doc);
CREATE INDEX sessions_owner ON sessions (owner_token, id) WHERE owner_token IS NOT NULL;
