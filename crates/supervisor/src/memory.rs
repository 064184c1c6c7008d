//! A session's memory limit: the largest program goes before the kernel ends the whole sandbox.

use crate::core::Core;
use model::ByteSize;
use std::{sync::Arc, time::Duration};
use tokio::io::{Interest, unix::AsyncFd};
use wire::{
    control::Phase,
    facts::Fact,
    guest::{Reply, Request},
};

/// How often use is looked at while it is near the limit.
const NEAR: Duration = Duration::from_millis(20);
/// How often where the machine can't raise an alarm.
const POLL: Duration = Duration::from_millis(250);

/// Watches until the process ends.
pub async fn watch(core: Arc<Core>, limit: ByteSize) {
    let near = ByteSize(limit.0 - limit.0 / 8);
    // SAFETY: an `OwnedFd` owns its descriptor until it is dropped, and nobody else registers it.
    let register = |fd| unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    let alarm = core.sandbox.memory_alarm(near).and_then(|fd| register(fd).ok());
    loop {
        let used = core.sandbox.usage().map_or(0, |usage| usage.memory_bytes);
        if used >= limit.0 && core.phase() == Phase::Running {
            relieve(&core, limit, used).await;
            continue;
        }
        let wait = async {
            match &alarm {
                // Page cache counts for the alarm and can be reclaimed; so near the limit use is looked at.
                Some(_) if used >= near.0 / 2 => tokio::time::sleep(NEAR).await,
                Some(alarm) => {
                    if let Ok(mut ready) = alarm.readable().await {
                        let _ = rustix::io::read(alarm.get_ref(), &mut [0; 8]);
                        ready.clear_ready();
                    }
                }
                None => tokio::time::sleep(if used >= near.0 / 2 { NEAR } else { POLL }).await,
            }
        };
        tokio::select! {
            () = wait => {}
            () = core.quit.cancelled() => return,
        }
    }
}

async fn relieve(core: &Core, limit: ByteSize, used: u64) {
    let killed = match core.link.request(Request::KillLargest { reason: "oom".to_owned() }).await {
        Ok(Reply::Killed { work: Some(work) }) => Some(match work {
            wire::guest::Work::Exec(id) => format!("exec {id}"),
            wire::guest::Work::Terminal(id) => format!("terminal {id}"),
            wire::guest::Work::Service(name) => format!("service {name}"),
        }),
        Ok(_) => None,
        Err(error) => {
            tracing::warn!(%error, "memory is at its limit and the guest can't be asked");
            None
        }
    };
    core.record(Fact::Oom { limit_bytes: limit.0, used_bytes: used, killed });
    // What was freed is given back to the machine little by little; and where nothing could be
    // ended, asking at once again would not help.
    for _ in 0..100 {
        tokio::time::sleep(NEAR).await;
        if core.sandbox.usage().is_none_or(|usage| usage.memory_bytes < limit.0) {
            return;
        }
    }
}
