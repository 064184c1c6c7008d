//! Checks of tokens, repeated requests, the list of accesses and the server's own words.

use super::*;
use crate::{Answer, AuditRow, Begun, RequestId, RequestMark, SecretRow, TokenRow};
use model::{ByteSize, TokenId, TokenLimits};

/// Tokens are found by hash, revoked once, and never twice there.
pub async fn tokens_read_back(store: Under) {
    let token = |hash: &str| TokenRow {
        id: TokenId::new(),
        name: "n".into(),
        hash: hash.into(),
        scopes: vec!["read".into(), "write".into()],
        sessions: Some(vec![SessionId::new()]),
        limits: TokenLimits {
            sessions: Some(0),
            running_sessions: Some(u64::MAX),
            cpus: Some(0.5),
            memory_bytes: Some(ByteSize(1 << 40)),
            disk_bytes: None,
            snapshot_bytes: None,
        },
        created_at: NOW,
        expires_at: Some(NOW),
        revoked_at: None,
        last_used_at: None,
    };
    let mut a = token("aa");
    let b = TokenRow { sessions: None, scopes: vec![], limits: TokenLimits::default(), expires_at: None, ..token("bb") };
    store.insert_token(a.clone()).await.unwrap();
    store.insert_token(b.clone()).await.unwrap();
    assert!(store.insert_token(token("aa")).await.is_err(), "one hash, one token");
    assert_eq!(store.token_by_hash("aa".into()).await.unwrap(), Some(a.clone()));
    assert_eq!(store.token_by_hash("AA".into()).await.unwrap(), None);

    let later = Timestamp(NOW.0 + 9);
    assert!(store.revoke_token(a.id, NOW).await.unwrap());
    assert!(store.revoke_token(a.id, later).await.unwrap());
    assert!(!store.revoke_token(TokenId::new(), NOW).await.unwrap());
    store.touch_tokens(vec![(a.id, later), (a.id, NOW), (TokenId::new(), NOW)]).await.unwrap();
    a.revoked_at = Some(NOW);
    a.last_used_at = Some(later);
    assert_eq!(store.list_tokens().await.unwrap(), [a, b]);
}

/// Secrets are found by name, changed under it, and gone once they are removed. Their bytes are kept as they are.
pub async fn secrets_read_back(store: Under) {
    let later = Timestamp(NOW.0 + 9);
    let secret = |name: &str, sealed: &[u8], at| SecretRow {
        name: name.parse().unwrap(),
        sealed: sealed.to_vec(),
        hosts: vec!["api.example.com".into(), "*.example.org".into()],
        created_at: at,
        updated_at: at,
    };
    let (b, a) = (secret("B_TOKEN", b"\x00\xff'", NOW), secret("A_TOKEN", &[7; 5000], NOW));
    store.put_secret(b.clone()).await.unwrap();
    store.put_secret(a.clone()).await.unwrap();
    assert_eq!(store.list_secrets().await.unwrap(), [a.clone(), b.clone()]);
    let changed = SecretRow { hosts: vec![], ..secret("B_TOKEN", b"new", later) };
    store.put_secret(changed.clone()).await.unwrap();
    let kept = SecretRow { created_at: NOW, ..changed };
    assert_eq!(store.secret(b.name.clone()).await.unwrap(), Some(kept));
    assert_eq!(store.secret("b_token".parse().unwrap()).await.unwrap(), None);
    assert!(store.remove_secret(b.name.clone()).await.unwrap());
    assert!(!store.remove_secret(b.name.clone()).await.unwrap());
    assert_eq!(store.list_secrets().await.unwrap(), [a]);
}

fn request(key: &str) -> RequestId {
    RequestId { owner: "token".into(), key: key.into(), route: "POST /v1/sessions".into() }
}

async fn begin(store: &Under, id: &RequestId, instance: &str, now: Timestamp) -> Begun {
    store.begin_request(id.clone(), "h".into(), instance.into(), now).await.unwrap()
}

/// Of many equal requests one is fresh; its answer is given again for a day; other owners and routes are apart.
pub async fn requests_are_answered_once(store: Under) {
    let id = request("k");
    let begun = all_of((0..20).map(|_| begin(&store, &id, "i", NOW)).collect()).await;
    assert_eq!(begun.iter().filter(|b| **b == Begun::Fresh).count(), 1);
    assert_eq!(begun.iter().filter(|b| **b == Begun::InProgress { body_hash: "h".into() }).count(), 19);

    let answer = Answer { status: 201, body: b"\x00{}\xff".to_vec() };
    store.finish_request(id.clone(), answer.clone()).await.unwrap();
    store.finish_request(id.clone(), Answer { status: 500, body: vec![] }).await.unwrap();
    store.abandon_request(id.clone()).await.unwrap();
    let done = Begun::Done { body_hash: "h".into(), answer };
    let other_body = store.begin_request(id.clone(), "other".into(), "j".into(), NOW).await.unwrap();
    assert_eq!(other_body, done, "the caller compares the hashes");
    let just_before = Timestamp(NOW.0 + RequestId::KEPT.as_millis() as i64 - 1);
    assert_eq!(begin(&store, &id, "j", just_before).await, done);
    assert_eq!(begin(&store, &id, "j", NOW.plus(RequestId::KEPT)).await, Begun::Fresh);

    for apart in [RequestId { owner: "x".into(), ..id.clone() }, RequestId { route: "x".into(), ..id.clone() }, request("K")] {
        assert_eq!(begin(&store, &apart, "i", NOW).await, Begun::Fresh, "{apart:?}");
    }
    let abandoned = request("a");
    begin(&store, &abandoned, "i", NOW).await;
    store.abandon_request(abandoned.clone()).await.unwrap();
    assert_eq!(begin(&store, &abandoned, "i", NOW).await, Begun::Fresh);
    assert_eq!(store.purge_requests(Timestamp(NOW.0 + 1)).await.unwrap(), 4);
    assert_eq!(begin(&store, &id, "j", NOW.plus(RequestId::KEPT)).await, Begun::InProgress { body_hash: "h".into() });
}

/// After a crash: what made something is known by what it made, what made nothing begins anew.
pub async fn requests_of_a_dead_server_are_told_apart(store: Under) {
    let (made, empty) = (request("made"), request("empty"));
    begin(&store, &made, "dead", NOW).await;
    begin(&store, &empty, "dead", NOW).await;
    let mut change = SessionChange::new(new_row());
    change.request = Some(RequestMark { id: made.clone(), made: change.session.id.to_string() });
    let session = change.session.id.to_string();
    store.commit(change).await.unwrap();

    store.abandon_request(made.clone()).await.unwrap();
    assert_eq!(begin(&store, &made, "dead", NOW).await, Begun::InProgress { body_hash: "h".into() });
    assert_eq!(begin(&store, &made, "new", NOW).await, Begun::Interrupted { body_hash: "h".into(), made: session });
    let other = store.begin_request(empty.clone(), "other".into(), "new".into(), NOW).await.unwrap();
    assert_eq!(other, Begun::InProgress { body_hash: "h".into() }, "another body still contradicts");
    assert_eq!(begin(&store, &empty, "new", NOW).await, Begun::Fresh);
    assert_eq!(begin(&store, &empty, "new", NOW).await, Begun::InProgress { body_hash: "h".into() });
    store.finish_request(made.clone(), Answer { status: 201, body: vec![] }).await.unwrap();
    assert!(matches!(begin(&store, &made, "new", NOW).await, Begun::Done { answer, .. } if answer.body.is_empty()));
}

/// Accesses are listed from the newest on, page by page, and forgotten by age.
pub async fn audit_is_newest_first(store: Under) {
    let row = |n: i64| AuditRow {
        at: Timestamp(n),
        actor: "token:x".into(),
        method: "GET".into(),
        path: format!("/v1/{n}"),
        status: 200,
        session_id: (n == 2).then(SessionId::new),
    };
    let rows: Vec<_> = (0..5).map(row).collect();
    store.append_audit(rows[..2].to_vec()).await.unwrap();
    store.append_audit(rows[2..].to_vec()).await.unwrap();
    store.append_audit(vec![]).await.unwrap();
    let page = store.list_audit(3, None).await.unwrap();
    assert_eq!(page.items, [rows[4].clone(), rows[3].clone(), rows[2].clone()]);
    let rest = store.list_audit(3, page.next_cursor).await.unwrap();
    assert_eq!((rest.items, rest.next_cursor), (vec![rows[1].clone(), rows[0].clone()], None));
    assert_eq!(store.purge_audit(Timestamp(3)).await.unwrap(), 3);
    assert_eq!(store.list_audit(9, None).await.unwrap().items.len(), 2);
}

/// A name has the value that was set last.
pub async fn meta_is_kept(store: Under) {
    assert_eq!(store.meta("a".into()).await.unwrap(), None);
    for value in ["1", "", "2"] {
        store.set_meta("a".into(), value.into()).await.unwrap();
        assert_eq!(store.meta("a".into()).await.unwrap().as_deref(), Some(value));
    }
    assert_eq!(store.meta("A".into()).await.unwrap(), None);
    // A copy is a file of its own, and never takes the place of one.
    let path = std::env::temp_dir().join(format!("dormouse-copy-{}", model::SessionId::new()));
    store.copy_to(path.clone()).await.unwrap();
    assert!(std::fs::metadata(&path).unwrap().len() > 0);
    assert!(store.copy_to(path.clone()).await.is_err());
    std::fs::remove_file(path).unwrap();
}
