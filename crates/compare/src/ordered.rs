//! Work shared out over threads whose results come back in the order of the work.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crossbeam_channel::bounded;

/// Takes items one by one from `next`, lets `threads` threads, each with what `own` made for it, turn them into results, and
/// hands these to `sink` in the items' order. At most four items a thread are held. Stops at the first error of any of them.
/// Where the system refuses threads, fewer do, or the calling one does all of it.
pub fn in_order<T, R, S, E>(
    threads: usize,
    mut next: impl FnMut() -> Result<Option<T>, E> + Send,
    own: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) -> Result<R, E> + Sync,
    mut sink: impl FnMut(R) -> Result<(), E>,
) -> Result<(), E>
where
    T: Send,
    R: Send,
    E: Send,
{
    let (items_in, items) = bounded::<(u64, T)>(threads);
    let (results_in, results) = bounded::<(u64, Result<R, E>)>(threads);
    // What is taken and not yet handed on is bounded by these tickets.
    let (tickets_in, tickets) = bounded::<()>(threads * 4);
    let (failed, next) = (Mutex::new(None), Mutex::new(&mut next));
    let sunk = std::thread::scope(|scope| {
        let (failed, next) = (&failed, &next);
        let start = || std::thread::Builder::new();
        let mut workers = 0;
        for _ in 0..threads {
            let (items, results_in, own, work) = (items.clone(), results_in.clone(), &own, &work);
            let working = start().spawn_scoped(scope, move || {
                let mut own = own();
                for (number, item) in items {
                    if results_in.send((number, work(&mut own, item))).is_err() {
                        return;
                    }
                }
            });
            workers += usize::from(working.is_ok());
        }
        let producing = (workers > 0).then(|| {
            start().spawn_scoped(scope, move || {
                let mut next = next.lock().unwrap_or_else(|e| e.into_inner());
                let mut number = 0;
                loop {
                    match next() {
                        Ok(Some(item)) => {
                            if tickets_in.send(()).is_err() || items_in.send((number, item)).is_err() {
                                return;
                            }
                            number += 1;
                        }
                        Ok(None) => return,
                        Err(error) => {
                            *failed.lock().unwrap_or_else(|e| e.into_inner()) = Some(error);
                            return;
                        }
                    }
                }
            })
        });
        drop((items, results_in));
        if !matches!(producing, Some(Ok(_))) {
            // What was to be moved into the thread has gone with it, and so the workers end.
            let (mut next, mut own) = (next.lock().unwrap_or_else(|e| e.into_inner()), own());
            while let Some(item) = next()? {
                sink(work(&mut own, item)?)?;
            }
            return Ok(());
        }
        // Who waits for a ticket must not wait for a sink that has failed: then they go.
        let mut tickets = Some(tickets);
        let mut early = BTreeMap::new();
        let (mut due, mut sunk) = (0, Ok(()));
        // Also after a failure to the end: a result that was left in the channel would live for as long as the workers do, and
        // what it holds might be waited for by the one who gives them work.
        for (number, result) in results {
            if tickets.is_none() {
                continue;
            }
            early.insert(number, result);
            while let Some(result) = early.remove(&due) {
                if let Err(error) = result.and_then(&mut sink) {
                    (sunk, tickets) = (Err(error), None);
                    early.clear();
                    break;
                }
                due += 1;
                let _ = tickets.as_ref().map(|tickets| tickets.try_recv());
            }
        }
        sunk
    });
    sunk?;
    match failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_sink_that_fails_ends_it_though_all_else_would_go_on() {
        // Endless work, and the first of it comes last: all that may be held is held when the sink fails.
        let ended = crossbeam_channel::bounded(1);
        let sender = ended.0;
        std::thread::spawn(move || {
            let mut number = 0;
            let next = || {
                number += 1;
                Ok(Some(number))
            };
            let work = |_: &mut (), number| {
                if number == 1 {
                    std::thread::sleep(Duration::from_millis(300));
                }
                Ok(())
            };
            let _ = sender.send(in_order(2, next, || (), work, |()| Err("enough")));
        });
        assert_eq!(ended.1.recv_timeout(Duration::from_secs(20)), Ok(Err("enough")));
    }

    #[test]
    fn what_is_held_is_let_go_when_the_sink_fails() {
        for _ in 0..2_000 {
            let ended = crossbeam_channel::bounded(1);
            let sender = ended.0;
            std::thread::spawn(move || {
                let mut number = 0;
                let mut reply: Option<crossbeam_channel::Receiver<()>> = None;
                let next = || {
                    number += 1;
                    if let Some(reply) = reply.take() {
                        // Comes to an end only when the item before is gone.
                        assert!(reply.recv().is_err());
                        return Ok(None);
                    }
                    let answer = (number == 3).then(|| crossbeam_channel::bounded(1));
                    Ok(Some(answer.map(|(answer, waits)| {
                        reply = Some(waits);
                        answer
                    })))
                };
                let sink = |item: Option<_>| if item.is_none() { Err("enough") } else { Ok(()) };
                let _ = sender.send(in_order(2, next, || (), |(), item| Ok(item), sink));
            });
            assert_eq!(ended.1.recv_timeout(Duration::from_secs(20)), Ok(Err("enough")));
        }
    }
}
