//! Random work on a repository, against a model that keeps full copies; with crashes at random moments.

use super::*;
use crate::Chunking;
use std::{collections::BTreeMap, pin::pin, task::Poll};

/// A small generator of choices that can be repeated (splitmix64, public domain constants).
struct Choices(u64);

impl Choices {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}

pub async fn random_work_agrees_with_a_model(place: &Location) {
    random_work(place, None).await;
}

pub async fn random_work_agrees_with_a_model_encrypted(place: &Location) {
    random_work(place, Some(key(1))).await;
}

/// What should be there.
#[derive(Default)]
struct Model {
    streams: BTreeMap<String, Vec<u8>>,
    /// Work that was cut off: it may be there or not, but then as a whole.
    maybe: BTreeMap<String, Vec<u8>>,
    made: u64,
}

async fn random_work(place: &Location, given: Option<KeySource>) {
    let set = std::env::var("DORMOUSE_SEED").ok().and_then(|text| text.parse().ok());
    let seed = set.unwrap_or_else(|| uuid::Uuid::new_v4().as_u64_pair().0);
    println!("DORMOUSE_SEED={seed}");
    let steps = if std::env::var_os("DORMOUSE_LONG").is_some() { 1000 } else { 120 };
    let mut choices = Choices(seed);
    let options = options().with_key(given);
    let mut repository = Repository::create(place, &options).await.unwrap();
    let mut model = Model::default();
    for step in 0..steps {
        println!("step {step}");
        match choices.below(10) {
            0..5 => write(&repository, &mut model, &mut choices, None).await,
            5 => delete(&repository, &mut model, &mut choices).await,
            6 => {
                collect(&repository).await;
            }
            7 => {
                let most = choices.below(60);
                write(&repository, &mut model, &mut choices, Some(most)).await;
                repository = reopen(place, &options, repository).await;
            }
            8 => {
                cut_off(choices.below(200), collect(&repository)).await;
                repository = reopen(place, &options, repository).await;
            }
            _ => {
                let mut other = Choices(choices.next());
                model.made += 1;
                let streams = model.streams.clone();
                let mut written = Model { made: 1_000_000 * model.made, streams, ..Model::default() };
                tokio::join!(write(&repository, &mut written, &mut other, None), collect(&repository));
                model.streams.extend(written.streams);
            }
        }
        compare(&repository, &mut model).await;
    }
    expect_whole(&repository).await;
    // In the end everything goes.
    for name in repository.manifests().await.unwrap() {
        repository.delete_manifest(&name).await.unwrap();
    }
    collect(&repository).await;
    let usage = repository.usage().await.unwrap();
    assert_eq!((usage.chunks, usage.packs), (0, 0), "{usage:?}");
}

/// Lets `work` come to its `most`th stop, then drops it.
async fn cut_off<T>(most: u64, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    let mut polled = 0;
    std::future::poll_fn(move |cx| {
        polled += 1;
        match work.as_mut().poll(cx) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending if polled > most => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// As a new process would: the old handle's work is given up first.
async fn reopen(place: &Location, options: &Options, old: Repository) -> Repository {
    let tasks = old.inner.tasks.clone();
    drop(old);
    tasks.close();
    tasks.wait().await;
    Repository::open(place, options).await.unwrap()
}

async fn write(repository: &Repository, model: &mut Model, choices: &mut Choices, cut: Option<u64>) {
    model.made += 1;
    let name = format!("s{}", model.made);
    let bytes = contents(model, choices);
    let chunking = match choices.below(3) {
        0 => Chunking::Content,
        1 => Chunking::MEMORY,
        _ => Chunking::Fixed(1 + choices.below(9000) as usize),
    };
    let work = async {
        let writer = repository.writer().unwrap();
        let stream = writer.write_stream(&bytes[..], chunking).await.unwrap();
        commit(writer, &name, &stream).await;
    };
    match cut {
        None => work.await,
        Some(most) => {
            if cut_off(most, work).await.is_none() {
                model.maybe.insert(name, bytes);
                return;
            }
        }
    }
    model.streams.insert(name, bytes);
}

/// Something new, or something old with changes.
fn contents(model: &Model, choices: &mut Choices) -> Vec<u8> {
    let some = model.streams.len() as u64;
    let old = model.streams.values().nth(choices.below(some) as usize);
    match (old, choices.below(3)) {
        (Some(old), 0 | 1) if !old.is_empty() => {
            let mut bytes = old.clone();
            for _ in 0..choices.below(8) {
                let at = choices.below(bytes.len() as u64) as usize;
                match choices.below(3) {
                    0 => bytes[at] ^= 0x55,
                    1 => drop(bytes.splice(at..at, random_bytes(choices.below(9000) as usize, choices.next()))),
                    _ => bytes.truncate(at + 1),
                }
            }
            bytes
        }
        (_, 2) => vec![0; choices.below(100_000) as usize],
        _ => {
            let (most, seed) = ([100, 10_000, 3_000_000][choices.below(3) as usize], choices.next());
            mixed_bytes(choices.below(most) as usize, seed)
        }
    }
}

async fn delete(repository: &Repository, model: &mut Model, choices: &mut Choices) {
    let some = model.streams.len() as u64;
    let Some(name) = model.streams.keys().nth(choices.below(some) as usize).cloned() else { return };
    repository.delete_manifest(&name).await.unwrap();
    model.streams.remove(&name);
}

async fn compare(repository: &Repository, model: &mut Model) {
    let names = repository.manifests().await.unwrap();
    // What was cut off is there, or it isn't.
    for (name, bytes) in std::mem::take(&mut model.maybe) {
        if names.contains(&name) {
            model.streams.insert(name, bytes);
        }
    }
    let mut expected: Vec<String> = model.streams.keys().cloned().collect();
    expected.sort();
    assert_eq!(names, expected);
    for (name, bytes) in &model.streams {
        let manifest = repository.manifest(name).await.unwrap().unwrap();
        let stream: StreamRef = serde_json::from_slice(&manifest).unwrap();
        assert!(read(repository, &stream).await.unwrap() == *bytes, "{name}");
    }
}
