//! A queue whose requests are executed by a few threads: the fallback without io_uring.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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
                    let result = work(&mut request);
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
        let done = if wait { self.done.recv().ok() } else { self.done.try_recv().ok() };
        // Takes one off the count even where nothing was found: the event may come after its completion was taken.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
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
