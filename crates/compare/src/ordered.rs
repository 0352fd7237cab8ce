//! Distributes work over threads and returns the results in order.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crossbeam_channel::{Receiver, Sender, bounded};

/// Takes items from `next`, turns them into results on `threads` threads, each with its own state from `own`, and passes the
/// results to `sink` in the order of the items. At most four items per thread are held. Stops at the first error of any of
/// the functions. If the system refuses threads, fewer are used, or only the calling one.
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
    // Tickets bound the items taken and not yet passed on.
    let (tickets_in, tickets) = bounded::<()>(threads * 4);
    let next = Mutex::new(&mut next);
    std::thread::scope(|scope| {
        let next = || next.lock().unwrap_or_else(|e| e.into_inner());
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
        let producing = move || produce(&mut *next(), &items_in, &tickets_in);
        let producing = (workers > 0).then(|| start().spawn_scoped(scope, producing));
        drop((items, results_in));
        let Some(Ok(producer)) = producing else {
            // The senders moved into the thread have been dropped with it, so the workers end.
            let (mut next, mut own) = (next(), own());
            while let Some(item) = next()? {
                sink(work(&mut own, item)?)?;
            }
            return Ok(());
        };
        consume(results, tickets, &mut sink)?;
        producer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Numbers the items and gives them to the workers, one for each ticket, until the receivers are gone.
fn produce<T, E>(
    next: &mut impl FnMut() -> Result<Option<T>, E>,
    items: &Sender<(u64, T)>,
    tickets: &Sender<()>,
) -> Result<(), E> {
    for number in 0.. {
        let Some(item) = next()? else { break };
        if tickets.send(()).is_err() || items.send((number, item)).is_err() {
            break;
        }
    }
    Ok(())
}

/// Passes the results to the sink in the order of their numbers, and takes back a ticket for each.
fn consume<R, E>(
    results: Receiver<(u64, Result<R, E>)>,
    tickets: Receiver<()>,
    sink: &mut impl FnMut(R) -> Result<(), E>,
) -> Result<(), E> {
    // Dropped when the sink fails, so that the producer does not wait for a ticket.
    let mut tickets = Some(tickets);
    let mut early = BTreeMap::new();
    let (mut due, mut sunk) = (0, Ok(()));
    // Drained to the end even after a failure: a result left in the channel would live as long as the workers, and the producer
    // might wait for something that it holds.
    for (number, result) in results {
        if tickets.is_none() {
            continue;
        }
        early.insert(number, result);
        while let Some(result) = early.remove(&due) {
            if let Err(error) = result.and_then(&mut *sink) {
                (sunk, tickets) = (Err(error), None);
                early.clear();
                break;
            }
            due += 1;
            let _ = tickets.as_ref().map(|tickets| tickets.try_recv());
        }
    }
    sunk
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_sink_that_fails_ends_it_though_all_else_would_go_on() {
        // Endless work whose first item comes last: as much as allowed is held when the sink fails.
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
                        // Ends only when the previous item is dropped.
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
