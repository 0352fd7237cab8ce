//! `--metrics`: what runs long answers Prometheus over HTTP, with the text of `dsync status --prometheus`.
//!
//! As much of HTTP/1.1 as a scrape needs: one request a connection, without a body. A client has [`PATIENCE`] for its request and
//! as long to take the answer, however slowly it sends; there are [`PLACES`] clients at once, of which the oldest gives way to another one, and
//! the text is made once a second at most, so nobody can keep the service from its work or others from it.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use source::StateDir;

use crate::failure;
use crate::output::Output;
use crate::status::monitor::Metrics;
use crate::terms::address::MetricsAddress;
use crate::unix_socket::{self, SocketFile};

/// How long a client may take for its request, and for the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Clients at once. A scrape takes milliseconds: a client that is cut off has sent nothing.
const PLACES: usize = 32;
/// The longest request.
const REQUEST_MAX: usize = 8 << 10;
/// How long a text is given to other clients as well.
const FRESH: Duration = Duration::from_secs(1);
/// The pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(200);

/// Metrics that are served as long as this lives.
#[derive(Debug)]
pub(crate) struct Serving {
    _file: Option<SocketFile>,
}

/// Serves metrics, if an address is given.
///
/// # Errors
/// If it cannot be listened on.
pub(crate) fn serve(
    address: Option<&MetricsAddress>,
    state: &StateDir,
    output: &Output,
) -> Result<Option<Serving>> {
    let Some(address) = address else { return Ok(None) };
    let page = Page { state: state.clone(), last: Mutex::new(None) };
    let (place, file) = match address {
        MetricsAddress::Tcp(address) => {
            let listener = TcpListener::bind(address);
            let listener = listener.with_context(|| format!("cannot serve metrics on {address}"))?;
            let place = format!("http://{}/metrics", listener.local_addr().unwrap_or(*address));
            accept(move || Ok(listener.accept()?.0), page)?;
            (place, None)
        }
        MetricsAddress::Unix(path) => {
            let (listener, file) = unix_socket::listen(path, unix_socket::OWN)?;
            accept(move || Ok(listener.accept()?.0), page)?;
            (format!("unix:{}", path.display()), Some(file))
        }
    };
    output.note(&format!("metrics on {place}"));
    Ok(Some(Serving { _file: file }))
}

/// A connection.
trait Client: Read + Write + Send + Sized + 'static {
    /// A second handle to the connection.
    fn again(&self) -> io::Result<Self>;
    /// Closes it, also while another thread waits for it.
    fn cut(&self);
    /// Bounds the next read and the next write.
    fn bound(&self, time: Duration) -> io::Result<()>;
}

impl Client for TcpStream {
    fn again(&self) -> io::Result<Self> {
        self.try_clone()
    }

    fn cut(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }

    fn bound(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time)).and_then(|()| self.set_write_timeout(Some(time)))
    }
}

impl Client for UnixStream {
    fn again(&self) -> io::Result<Self> {
        self.try_clone()
    }

    fn cut(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }

    fn bound(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time)).and_then(|()| self.set_write_timeout(Some(time)))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers clients in threads of their own, until the process ends.
fn accept<C: Client>(next: impl Fn() -> io::Result<C> + Send + 'static, page: Page) -> Result<()> {
    let (page, clients) = (Arc::new(page), Arc::new(Mutex::new(VecDeque::new())));
    let run = move || {
        for number in 0_u64.. {
            let Ok((client, ours)) = next().and_then(|client| Ok((client.again()?, client))) else {
                // Such as one descriptor too many.
                std::thread::sleep(PAUSE);
                continue;
            };
            let (page, all) = (Arc::clone(&page), Arc::clone(&clients));
            let leave = move || lock(&all).retain(|(other, _)| *other != number);
            let serve = {
                let leave = leave.clone();
                move || {
                    // Who is gone, or too slow, gets no answer.
                    let _ = answer(client, &page);
                    leave();
                }
            };
            {
                let mut clients = lock(&clients);
                clients.push_back((number, ours));
                let oldest = (clients.len() > PLACES).then(|| clients.pop_front()).flatten();
                oldest.inspect(|(_, silent)| silent.cut());
            }
            if std::thread::Builder::new().name("metrics-client".into()).spawn(serve).is_err() {
                leave();
            }
        }
    };
    std::thread::Builder::new().name("metrics".into()).spawn(run).context("cannot start a thread")?;
    Ok(())
}

/// The text, or why there is none.
type Text = Result<Arc<str>, String>;

/// The text, as it was made last.
struct Page {
    state: StateDir,
    last: Mutex<Option<(Instant, Text)>>,
}

impl Page {
    fn text(&self) -> Text {
        let mut last = lock(&self.last);
        if let Some((_, text)) = last.as_ref().filter(|(made, _)| made.elapsed() < FRESH) {
            return text.clone();
        }
        let text = Metrics::read(&self.state).map(|metrics| metrics.text.into());
        let text = text.map_err(|error| failure::text(&error));
        *last = Some((Instant::now(), text.clone()));
        text
    }
}

/// Reads a request and answers it.
fn answer(mut client: impl Client, page: &Page) -> io::Result<()> {
    let response = match request(&mut client)? {
        Ok(request) => respond(&request, page),
        Err(status) => response(status, "", "", true),
    };
    send(&mut client, response.as_bytes())?;
    client.flush()
}

/// A request's method and path.
struct Request {
    method: String,
    path: String,
}

/// Reads the head of a request; an inner `Err` is the status of a wrong one.
fn request(client: &mut impl Client) -> io::Result<Result<Request, &'static str>> {
    let until = Instant::now() + PATIENCE;
    let mut head = Vec::new();
    let mut part = [0; 1024];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if head.len() >= REQUEST_MAX {
            return Ok(Err("431 Request Header Fields Too Large"));
        }
        client.bound(left(until)?)?;
        match client.read(&mut part)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => head.extend_from_slice(&part[..more]),
        }
    }
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = std::str::from_utf8(line).unwrap_or_default().split(' ');
    Ok(match (words.next(), words.next(), words.next(), words.next()) {
        (Some(method), Some(target), Some("HTTP/1.1" | "HTTP/1.0"), None) => {
            let path = target.split('?').next().unwrap_or_default();
            Ok(Request { method: method.into(), path: path.into() })
        }
        _ => Err("400 Bad Request"),
    })
}

/// The time left, which is not zero.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn respond(request: &Request, page: &Page) -> String {
    let has_body = request.method != "HEAD";
    if !matches!(request.method.as_str(), "GET" | "HEAD") {
        return response("405 Method Not Allowed", "Allow: GET, HEAD\r\n", "", true);
    }
    if request.path != "/metrics" {
        return response("404 Not Found", "", "metrics are at /metrics\n", has_body);
    }
    match page.text() {
        Ok(text) => response("200 OK", "", &text, has_body),
        Err(error) => response("500 Internal Server Error", "", &format!("{error}\n"), has_body),
    }
}

/// A response; to HEAD without its body.
fn response(status: &str, headers: &str, body: &str, has_body: bool) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n{headers}Connection: \
         close\r\n\r\n{}",
        body.len(),
        if has_body { body } else { "" }
    )
}

/// Sends a response in the time that a client has.
fn send(client: &mut impl Client, mut rest: &[u8]) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    while !rest.is_empty() {
        client.bound(left(until)?)?;
        match client.write(rest)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => rest = &rest[written..],
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a server over the far end of a pair answers.
    fn exchange(text: &[u8]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let page = Page { state: StateDir::find(Some(folder.path())), last: Mutex::new(None) };
        let (mut near, far) = UnixStream::pair().unwrap();
        let serving = std::thread::spawn(move || answer(far, &page));
        let _ = near.write_all(text);
        let _ = near.shutdown(std::net::Shutdown::Write);
        let mut said = String::new();
        let _ = near.read_to_string(&mut said);
        let _ = serving.join().unwrap();
        said
    }

    #[test]
    fn requests_are_answered_and_others_refused() {
        let status = |text: &str| exchange(text.as_bytes()).lines().next().map(str::to_owned);
        let is = |text: &str, code: &str| {
            let status = status(text).unwrap_or_default();
            assert!(status.starts_with(&format!("HTTP/1.1 {code} ")), "{text}: {status}");
        };
        is("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", "200");
        is("GET /metrics?x=1 HTTP/1.0\r\n\r\n", "200");
        is("GET / HTTP/1.1\r\n\r\n", "404");
        is("POST /metrics HTTP/1.1\r\n\r\n", "405");
        is("GET /metrics\r\n\r\n", "400");
        is("\u{16}\u{3}\u{1}\r\n\r\n", "400");
        is(&format!("GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(REQUEST_MAX)), "431");
        assert_eq!(status("GET /metrics HTTP/1.1\r\n"), None, "a request that is cut off");
        let head = exchange(b"HEAD /metrics HTTP/1.1\r\n\r\n");
        assert!(head.contains("Content-Length: ") && head.ends_with("\r\n\r\n"), "{head}");
        let whole = exchange(b"GET /metrics HTTP/1.1\r\n\r\n");
        let (head, body) = whole.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
        assert!(body.contains("dsync_status_errors 0\n"), "{body}");
    }

    #[test]
    fn random_bytes_are_never_a_panic() {
        let mut random = testing::Random::new("requests of a scrape");
        for _ in 0..200 {
            let words = ["GET ", "/metrics", " HTTP/1.1", "\r\n", "\r", "\0", "é", "HEAD ", " "];
            let parts = random.below(10);
            let text: String = (0..parts).map(|_| words[random.below(words.len() as u64) as usize]).collect();
            exchange(text.as_bytes());
        }
    }
}
