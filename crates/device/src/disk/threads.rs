//! A queue whose requests are executed by a few threads: the fallback without io_uring.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use rustix::event::{EventfdFlags, eventfd};

use crate::disk::{Done, Queue, Request};

/// Executes one request.
type Work = dyn Fn(&mut Request) -> io::Result<()> + Send + Sync;

/// More threads do not help.
const MOST: u32 = 16;

/// Executes requests on up to 16 threads, in any order.
pub struct ThreadQueue {
    /// `None` once the queue is being dropped, which ends the workers.
    requests: Option<Sender<Request>>,
    done: Receiver<Done>,
    workers: Vec<JoinHandle<()>>,
    in_flight: usize,
    /// Counts completions, for polling.
    event: Arc<OwnedFd>,
}

impl ThreadQueue {
    /// A queue that keeps `depth` requests in flight, each executed by `work`.
    ///
    /// # Errors
    /// If not even one thread can be started.
    pub fn new(work: Arc<Work>, depth: u32) -> io::Result<ThreadQueue> {
        let (requests, inbox) = unbounded::<Request>();
        let (outbox, done) = unbounded();
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let event = Arc::new(eventfd(0, flags)?);
        let mut queue =
            ThreadQueue { requests: Some(requests), done, workers: Vec::new(), in_flight: 0, event };
        for _ in 0..depth.clamp(1, MOST) {
            let (inbox, outbox, work, event) =
                (inbox.clone(), outbox.clone(), Arc::clone(&work), Arc::clone(&queue.event));
            let run = move || {
                for mut request in inbox {
                    // A panic would end the thread and leave the request in flight for ever.
                    let result = catch_unwind(AssertUnwindSafe(|| work(&mut request)))
                        .unwrap_or_else(|_| Err(io::Error::other("the request's thread panicked")));
                    // The completion before the event, so that a woken thread finds it.
                    if outbox.send(Done { request, result }).is_err() {
                        return;
                    }
                    let _ = rustix::io::write(&event, &1u64.to_ne_bytes());
                }
            };
            match std::thread::Builder::new().name("disk".into()).spawn(run) {
                Ok(worker) => queue.workers.push(worker),
                Err(error) if queue.workers.is_empty() => return Err(error),
                // Fewer threads are only slower.
                Err(_) => break,
            }
        }
        Ok(queue)
    }
}

impl Queue for ThreadQueue {
    fn submit(&mut self, request: Request) {
        if let Some(requests) = &self.requests {
            self.in_flight += 1;
            // Fails only without workers, which live as long as `self`.
            let _ = requests.send(request);
        }
    }

    fn start(&mut self) {}

    fn complete(&mut self, wait: bool) -> Option<Done> {
        if self.in_flight == 0 {
            return None;
        }
        // Takes one off the count, also where nothing is found then: the event may come after its completion was taken. *Before* it is
        // looked for one: the event of one that comes in between must stay, or nothing would wake who polls.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        let done = if wait { self.done.recv().ok() } else { self.done.try_recv().ok() };
        self.in_flight -= usize::from(done.is_some());
        done
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }
}

impl Drop for ThreadQueue {
    fn drop(&mut self) {
        self.requests = None;
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::{Buf, Piece, RequestKind};

    #[test]
    fn a_panic_completes_its_request_with_an_error() {
        let mut queue = ThreadQueue::new(Arc::new(|_: &mut Request| panic!("planted")), 1).unwrap();
        for token in 0..2 {
            let pieces = [Piece { offset: 0, len: 1 }].into_iter().collect();
            queue.submit(Request { kind: RequestKind::Read, pieces, buf: Buf::new(1), token });
            let done = queue.complete(true).expect("a completion");
            assert_eq!((done.request.token, done.result.is_err()), (token, true));
        }
    }

    /// A completion comes at any moment of a look for it: who then polls is woken.
    #[test]
    fn who_polls_is_woken_for_each_completion() {
        let mut queue = ThreadQueue::new(Arc::new(|_: &mut Request| Ok(())), 4).unwrap();
        for token in 0..100_000 {
            let pieces = [Piece { offset: 0, len: 1 }].into_iter().collect();
            queue.submit(Request { kind: RequestKind::Read, pieces, buf: Buf::new(1), token });
            // Now later, now sooner.
            (0..token % 97).for_each(|_| std::hint::spin_loop());
            while queue.complete(false).is_none() {
                let fd = queue.wait_fd().unwrap();
                let mut fds = [PollFd::new(&fd, PollFlags::IN)];
                let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
                assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "nobody wakes who waits for {token}");
            }
        }
    }
}
