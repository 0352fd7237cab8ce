//! A connection that threads share: each sends its request, and reads the content of its own replies from the socket into
//! its own buffer. So many requests are in flight over one connection, nothing is copied, and no thread serves the others.
//!
//! Whoever waits while nobody reads takes the input and reads the next head. If that is another's, it hands the input over
//! together with the head. A thread that has read its last part leaves the input, and wakes one that waits.

use std::collections::HashMap;
use std::io::{self, BufReader};
use std::sync::{Mutex, MutexGuard};
use std::thread::Thread;

use crate::client::{Arrived, ByteStream, DISCONNECT, Order, ReplyHead, error_of};

type Input = BufReader<Box<dyn ByteStream>>;

/// A connection for any number of threads. Once it has failed, it fails for ever: what the server has done by then is not known.
pub(crate) struct Connection {
    output: Mutex<Box<dyn ByteStream>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What the server sends; `None` while a thread reads from it.
    input: Option<Input>,
    /// The head of a reply whose content is next in the input.
    head: Option<ReplyHead>,
    /// Requests in flight, and their threads, once they wait.
    waiting: HashMap<u64, Option<Thread>>,
    next: u64,
    broken: Option<(io::ErrorKind, String)>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Connection {
    pub(crate) fn new(input: Input, output: Box<dyn ByteStream>) -> Connection {
        let state = State { input: Some(input), ..State::default() };
        Connection { output: Mutex::new(output), state: Mutex::new(state) }
    }

    /// Sends a request with its `data`, and waits for its reply; `buf` is that of a read, else empty.
    ///
    /// # Errors
    /// The server's, or that the connection has failed.
    pub(crate) fn ask(&self, order: Order, data: &[u8], buf: &mut [u8]) -> io::Result<Arrived> {
        let cookie = self.register()?;
        // Not in one expression: the output must be free before the failure is told to all.
        let sent = order.send(&mut *lock(&self.output), cookie, data);
        sent.map_err(|error| self.fail(error))?;
        let mut arrived = Arrived::default();
        loop {
            let (mut input, head) = self.turn(cookie)?;
            let last = head.last;
            let mut taken = arrived.take(head.part, &mut input, order.offset, buf);
            if last {
                taken = taken.and_then(|()| arrived.check(buf.len()));
            }
            taken.map_err(|error| self.fail(error))?;
            self.leave(input, last.then_some(cookie));
            if last {
                return if arrived.error == 0 { Ok(arrived) } else { Err(error_of(arrived.error)) };
            }
        }
    }

    /// Tells the server that nothing more will come.
    pub(crate) fn close(&self) {
        let order = Order { kind: DISCONNECT, flags: 0, offset: 0, len: 0 };
        let _ = order.send(&mut *lock(&self.output), 0, &[]);
    }

    fn register(&self) -> io::Result<u64> {
        let mut state = lock(&self.state);
        state.check()?;
        state.next += 1;
        let cookie = state.next;
        state.waiting.insert(cookie, None);
        Ok(cookie)
    }

    /// Waits for the next part of the reply to `cookie`, and reads heads if nobody else does.
    fn turn(&self, cookie: u64) -> io::Result<(Input, ReplyHead)> {
        let mut state = lock(&self.state);
        loop {
            state.check()?;
            let mine = state.head.as_ref().is_none_or(|head| head.cookie == cookie);
            if let Some(mut input) = state.input.take_if(|_| mine) {
                if let Some(head) = state.head.take() {
                    return Ok((input, head));
                }
                drop(state);
                let head = ReplyHead::read(&mut input).map_err(|error| self.fail(error))?;
                state = lock(&self.state);
                match state.waiting.get(&head.cookie) {
                    // One that is still sending looks when it has sent.
                    Some(waiter) => waiter.iter().for_each(Thread::unpark),
                    None => {
                        drop(state);
                        return Err(
                            self.fail(io::Error::new(io::ErrorKind::InvalidData, "a reply to no request"))
                        );
                    }
                }
                (state.input, state.head) = (Some(input), Some(head));
                continue;
            }
            state.waiting.insert(cookie, Some(std::thread::current()));
            drop(state);
            std::thread::park();
            state = lock(&self.state);
        }
    }

    /// Gives the input back, for good if the reply to `finished` is whole.
    fn leave(&self, input: Input, finished: Option<u64>) {
        let mut state = lock(&self.state);
        state.input = Some(input);
        if let Some(cookie) = finished {
            state.waiting.remove(&cookie);
            // Somebody must read on.
            state.waiting.values().flatten().take(1).for_each(Thread::unpark);
        }
    }

    /// Ends the connection for all threads, and returns why.
    fn fail(&self, error: io::Error) -> io::Error {
        let mut state = lock(&self.state);
        if state.broken.is_none() {
            state.broken = Some(match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    (io::ErrorKind::TimedOut, "the NBD server does not answer".to_owned())
                }
                io::ErrorKind::InvalidData => {
                    (io::ErrorKind::InvalidData, format!("the NBD server broke the protocol: {error}"))
                }
                io::ErrorKind::UnexpectedEof => {
                    (io::ErrorKind::ConnectionAborted, "the NBD server closed the connection".to_owned())
                }
                _ => (
                    io::ErrorKind::ConnectionAborted,
                    format!("the connection to the NBD server broke: {error}"),
                ),
            });
        }
        state.waiting.values().flatten().for_each(Thread::unpark);
        state.check().err().unwrap_or(error)
    }
}

impl State {
    fn check(&self) -> io::Result<()> {
        self.broken.as_ref().map_or(Ok(()), |(kind, text)| Err(io::Error::new(*kind, text.clone())))
    }
}
