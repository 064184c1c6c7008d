//! Manifests, and what they refuse.

use super::world::random;
use crate::{
    Hash,
    image::ImageDescriptor,
    layer::LayerDescriptor,
    parcel::{
        GuestPart, ImagePart, ImageRef, JournalPart, LayerPart, Manifest, ParcelError, ParcelKind, Requires, RunscPart,
        TemplatePart, TreeRef,
    },
};
use blob::{ChunkId, MAX_MANIFEST, StreamRef};
use model::{Generation, LayerId, SessionId, Timestamp};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeSet;

fn stream(n: u8) -> StreamRef {
    StreamRef::of_chunk(ChunkId([n; 32]), u64::from(n))
}

fn tree(n: u8) -> TreeRef {
    let stream = stream(n);
    TreeRef { digest: TreeRef::digest_of(&stream), stream, entries: 3, plain_bytes: 100 }
}

fn layer(n: u8) -> LayerPart {
    let (session, created_at) = (SessionId::new(), Timestamp(1_700_000_000_000));
    let descriptor = LayerDescriptor { session, created_at, size_bytes: 5, own_bytes: 4, entries: 3 };
    LayerPart { id: LayerId::new(), descriptor, tree: tree(n) }
}

fn manifest() -> Manifest {
    let image = ImageDescriptor {
        session: SessionId::new(),
        generation: Generation(3),
        created_at: Timestamp(1),
        runtime: "gvisor".to_owned(),
        runsc_hash: "r".to_owned(),
        runsc_version: "1".to_owned(),
        guest_hash: "g".to_owned(),
        template_hash: "t".to_owned(),
        lower: vec!["/layers/a".into()],
        cpu_features: BTreeSet::from(["sse2".to_owned()]),
        files: Vec::new(),
    };
    let files = vec![("pages.img".to_owned(), stream(3)), ("works".to_owned(), stream(4))];
    Manifest {
        kind: ParcelKind::Snapshot,
        made_at: Timestamp(1_700_000_000_000),
        server_version: "0.1.0".to_owned(),
        row: json!({ "id": "a", "labels": { "x": "é\n" } }),
        session: Some(json!({ "id": "b" })),
        upper: Some(tree(9)),
        layers: vec![layer(1), layer(2)],
        image: Some(ImagePart { generation: Generation(3), descriptor: image, image: ImageRef { files } }),
        journals: vec![JournalPart { path: "execs/1".to_owned(), segments: vec![("0.seg".to_owned(), stream(5))] }],
        template: Some(TemplatePart { hash: Hash::of(b"t"), name: "debian".to_owned(), descriptor: json!({}), tree: tree(6) }),
        guest: Some(GuestPart { hash: Hash::of(b"g"), tree: tree(7) }),
        runsc: Some(RunscPart { hash: Hash::of(b"r"), version: "1".to_owned(), stream: stream(8) }),
        requires: Requires {
            runtime: "gvisor".to_owned(),
            runtime_version: "20240729".to_owned(),
            cpu_features: vec!["sse2".to_owned()],
            memory_bytes: 1 << 30,
            generation: Some(Generation(3)),
        },
        renews: vec!["hostname".to_owned()],
        history: Some(stream(10)),
    }
}

/// The same body with another envelope.
fn sealed(format: u32, body: &[u8]) -> Vec<u8> {
    [b"dormouse-parcel\n", &format.to_le_bytes()[..], blake3::hash(body).as_bytes(), body].concat()
}

#[test]
fn it_reads_back_and_tells_all_its_streams() {
    let manifest = manifest();
    let bytes = manifest.encode().unwrap();
    assert_eq!(Manifest::decode(&bytes).unwrap(), manifest);
    assert_eq!(manifest.encode().unwrap(), bytes);
    let mut streams: Vec<u64> = manifest.streams().map(|stream| stream.len).collect();
    streams.sort_unstable();
    assert_eq!(streams, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
}

/// Every reference that is in the text is among the streams: none that is added later can be forgotten.
#[test]
fn no_reference_is_left_out() {
    fn references(value: &Value) -> usize {
        match value {
            Value::Object(fields) if fields.contains_key("len") && fields.contains_key("entries") => 1,
            Value::Object(fields) => fields.values().map(references).sum(),
            Value::Array(list) => list.iter().map(references).sum(),
            _ => 0,
        }
    }
    let manifest = manifest();
    assert_eq!(references(&serde_json::to_value(&manifest).unwrap()), manifest.streams().count());
}

#[test]
fn every_flipped_byte_and_every_cut_is_noticed() {
    let manifest = manifest();
    let good = manifest.encode().unwrap();
    for at in 0..good.len() {
        for bit in [1, 0x80] {
            let mut bad = good.clone();
            bad[at] ^= bit;
            let error = Manifest::decode(&bad).unwrap_err();
            assert!(matches!(error, ParcelError::Damaged(_) | ParcelError::Newer { .. }), "byte {at}: {error}");
        }
        assert!(matches!(Manifest::decode(&good[..at]), Err(ParcelError::Damaged(_))), "cut to {at}");
    }
    assert!(matches!(Manifest::decode(&[good, vec![b' ']].concat()), Err(ParcelError::Damaged(_))));
}

#[test]
fn a_newer_format_is_told_by_its_number() {
    // Whatever follows the number may be different.
    for rest in [&b""[..], b"something new"] {
        let newer = [b"dormouse-parcel\n", &7_u32.to_le_bytes()[..], rest].concat();
        let error = Manifest::decode(&newer).unwrap_err();
        assert!(matches!(&error, ParcelError::Newer { found: 7, newest: 1, .. }) && !error.is_loss(), "{error}");
    }
    assert!(matches!(Manifest::decode(&sealed(0, b"{}")), Err(ParcelError::Damaged(_))));
}

#[test]
fn what_is_added_later_is_ignored_and_what_was_added_may_be_missing() {
    let mut value = serde_json::to_value(manifest()).unwrap();
    value["later"] = json!([1, 2]);
    value["layers"][0]["later"] = json!({});
    value["requires"]["later"] = json!(true);
    assert_eq!(Manifest::decode(&sealed(1, &serde_json::to_vec(&value).unwrap())).unwrap().layers.len(), 2);
    let least = json!({ "kind": "export", "made_at": value["made_at"], "server_version": "0.1.0" });
    let manifest = Manifest::decode(&sealed(1, least.to_string().as_bytes())).unwrap();
    assert_eq!((manifest.kind, manifest.streams().count()), (ParcelKind::Export, 0));
    for wrong in [&b""[..], b"{}", b"[]", br#"{"kind":"else","made_at":1,"server_version":""}"#] {
        assert!(matches!(Manifest::decode(&sealed(1, wrong)), Err(ParcelError::Damaged(_))));
    }
}

#[test]
fn it_has_a_limit() {
    let long = Manifest { row: json!("x".repeat(MAX_MANIFEST)), ..manifest() };
    assert!(matches!(long.encode(), Err(ParcelError::TooLarge { limit: MAX_MANIFEST, .. })));
    assert!(matches!(Manifest::decode(&vec![0; MAX_MANIFEST + 1]), Err(ParcelError::TooLarge { .. })));
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(body in prop::collection::vec(any::<u8>(), 0..200), seed in any::<u64>()) {
        prop_assert!(Manifest::decode(&body).is_err());
        prop_assert!(Manifest::decode(&sealed(1, &body)).is_err());
        prop_assert!(Manifest::decode(&[&b"dormouse-parcel\n"[..], &random(60, seed)].concat()).is_err());
    }
}
