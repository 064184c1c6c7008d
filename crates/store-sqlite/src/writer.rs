//! The one task that writes: it takes what is queued into one transaction and answers all at its commit.
//!
//! Each caller's work runs in a savepoint, so that one that is refused (a conflict, a taken key)
//! leaves nothing and harms nobody. Only when the database itself gives up the transaction (no
//! space, an I/O error) does everybody in it get that error, and nothing of it is written.

use crate::{BoxFuture, error::from_sqlx};
use sqlx::{
    Connection,
    sqlite::{SqliteConnectOptions, SqliteConnection},
};
use store::StoreError;
use tokio::sync::{mpsc, oneshot};

/// How many callers share one transaction at most.
const BATCH: usize = 64;
/// How many wait in the queue; more wait to get into it.
const QUEUE: usize = 256;

/// What a caller's work came to: why its savepoint is not kept, and how the caller is told.
struct Finished {
    failed: Option<StoreError>,
    answer: Box<dyn FnOnce(Result<(), StoreError>) + Send>,
}

trait Job: Send {
    fn run<'c>(self: Box<Self>, conn: &'c mut SqliteConnection) -> BoxFuture<'c, Finished>;
    fn refuse(self: Box<Self>, error: StoreError);
}

struct Work<T, F> {
    work: F,
    reply: oneshot::Sender<Result<T, StoreError>>,
}

impl<T, F> Job for Work<T, F>
where
    T: Send + 'static,
    F: for<'c> FnOnce(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, StoreError>> + Send + 'static,
{
    fn run<'c>(self: Box<Self>, conn: &'c mut SqliteConnection) -> BoxFuture<'c, Finished> {
        let Work { work, reply } = *self;
        Box::pin(async move {
            let result = work(conn).await;
            Finished {
                failed: result.as_ref().err().cloned(),
                // A caller that is gone doesn't need its answer.
                answer: Box::new(move |committed| drop(reply.send(result.and_then(|value| committed.map(|()| value))))),
            }
        })
    }

    fn refuse(self: Box<Self>, error: StoreError) {
        drop(self.reply.send(Err(error)));
    }
}

enum Message {
    Job(Box<dyn Job>),
    Close(oneshot::Sender<()>),
}

/// The way into the queue. The task ends when this is dropped, after writing what is queued.
pub(crate) struct Writer {
    queue: mpsc::Sender<Message>,
}

impl Writer {
    /// Opens the connection and starts the task.
    pub(crate) async fn start(options: SqliteConnectOptions) -> Result<Writer, sqlx::Error> {
        let conn = SqliteConnection::connect_with(&options).await?;
        let (queue, jobs) = mpsc::channel(QUEUE);
        tokio::spawn(run(Some(conn), options, jobs));
        Ok(Writer { queue })
    }

    /// Queues `work` and waits for its commit.
    pub(crate) async fn write<T, F>(&self, work: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> FnOnce(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, StoreError>> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let job: Box<dyn Job> = Box::new(Work { work, reply });
        self.queue.send(Message::Job(job)).await.map_err(|_| StoreError::Closed)?;
        answer.await.map_err(|_| StoreError::Closed)?
    }

    /// Waits until everything queued so far is written and the connection is closed.
    pub(crate) async fn close(&self) {
        let (reply, closed) = oneshot::channel();
        if self.queue.send(Message::Close(reply)).await.is_ok() {
            // An error means that another call closes it.
            let _ = closed.await;
        }
    }
}

async fn run(mut conn: Option<SqliteConnection>, options: SqliteConnectOptions, mut queue: mpsc::Receiver<Message>) {
    let mut taken = Vec::with_capacity(BATCH);
    let mut closing = None;
    while closing.is_none() && queue.recv_many(&mut taken, BATCH).await > 0 {
        let mut jobs = Vec::with_capacity(taken.len());
        for message in taken.drain(..) {
            match message {
                // Behind a Close nothing is taken any more.
                Message::Job(job) if closing.is_some() => job.refuse(StoreError::Closed),
                Message::Job(job) => jobs.push(job),
                Message::Close(reply) => closing = closing.or(Some(reply)),
            }
        }
        if !jobs.is_empty() {
            conn = write_batch(conn, &options, jobs).await;
        }
    }
    if let Some(conn) = conn
        && let Err(error) = conn.close().await
    {
        tracing::warn!(%error, "the store's file was not closed cleanly; its log will be read at the next start");
    }
    if let Some(reply) = closing {
        // The caller may have stopped waiting.
        let _ = reply.send(());
    }
}

/// Writes the jobs in one transaction. Gives the connection back if it is good for another.
async fn write_batch(
    conn: Option<SqliteConnection>,
    options: &SqliteConnectOptions,
    jobs: Vec<Box<dyn Job>>,
) -> Option<SqliteConnection> {
    let opened = match conn {
        Some(conn) => Ok(conn),
        None => SqliteConnection::connect_with(options).await,
    };
    let mut conn = match opened {
        Ok(conn) => conn,
        Err(error) => {
            tracing::error!(%error, "the store can't be opened for writing");
            refuse_all(jobs, &from_sqlx(&error));
            return None;
        }
    };
    if let Err(error) = sqlx::query("BEGIN IMMEDIATE").execute(&mut conn).await {
        refuse_all(jobs, &from_sqlx(&error));
        return keep_if_idle(conn).await;
    }
    let mut finished = Vec::with_capacity(jobs.len());
    let mut jobs = jobs.into_iter();
    let broken = loop {
        let Some(job) = jobs.next() else { break None };
        if let Err(error) = sqlx::query("SAVEPOINT job").execute(&mut conn).await {
            job.refuse(from_sqlx(&error));
            break Some(from_sqlx(&error));
        }
        let done = job.run(&mut conn).await;
        let failed = done.failed.clone();
        let end = if failed.is_none() { "RELEASE job" } else { "ROLLBACK TO job; RELEASE job" };
        finished.push(done);
        if let Err(error) = sqlx::raw_sql(end).execute(&mut conn).await {
            // The job's error made SQLite take back the whole transaction: that is what happened to all.
            break Some(failed.unwrap_or_else(|| from_sqlx(&error)));
        }
    };
    if let Some(error) = broken {
        tracing::error!(%error, writers = finished.len(), "the database gave up a transaction; nothing of it was written");
        finished.into_iter().for_each(|f| (f.answer)(Err(error.clone())));
        refuse_all(jobs, &error);
        return keep_if_idle(conn).await;
    }
    match sqlx::query("COMMIT").execute(&mut conn).await {
        Ok(_) => {
            finished.into_iter().for_each(|f| (f.answer)(Ok(())));
            Some(conn)
        }
        Err(error) => {
            let error = match from_sqlx(&error) {
                known @ (StoreError::NoSpace | StoreError::Busy) => known,
                _ => StoreError::OutcomeUnknown(error.to_string()),
            };
            tracing::error!(%error, writers = finished.len(), "a commit failed");
            // First the connection is gone, so that an answered caller reads what is really there.
            drop_connection(conn).await;
            finished.into_iter().for_each(|f| (f.answer)(Err(error.clone())));
            None
        }
    }
}

fn refuse_all(jobs: impl IntoIterator<Item = Box<dyn Job>>, error: &StoreError) {
    jobs.into_iter().for_each(|job| job.refuse(error.clone()));
}

/// Ends what may be left of a transaction.
async fn keep_if_idle(mut conn: SqliteConnection) -> Option<SqliteConnection> {
    // "No transaction is active" is as good as a rollback; anything else shows at this query.
    let _ = sqlx::query("ROLLBACK").execute(&mut conn).await;
    match sqlx::query("SELECT 1").execute(&mut conn).await {
        Ok(_) => Some(conn),
        Err(_) => {
            drop_connection(conn).await;
            None
        }
    }
}

async fn drop_connection(mut conn: SqliteConnection) {
    let _ = sqlx::query("ROLLBACK").execute(&mut conn).await;
    if let Err(error) = conn.close().await {
        tracing::warn!(%error, "the store's writing connection was not closed cleanly");
    }
}
