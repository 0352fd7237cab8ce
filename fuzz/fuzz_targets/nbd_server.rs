//! The NBD server against any bytes that a client may send, from its first one on.

#![no_main]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, LazyLock};

use device::RamDisk;
use libfuzzer_sys::fuzz_target;
use nbd::{Export, ExportInfo, ExportRefusal, Exports, Server};

struct One(Arc<RamDisk>);

impl Exports for One {
    fn list(&self) -> Vec<ExportInfo> {
        vec![ExportInfo { name: "disk".into(), description: "for the fuzzer".into() }]
    }
    fn open(&self, name: &str) -> Result<Export, ExportRefusal> {
        Ok(Export::new(name, self.0.clone()))
    }
}

static SERVER: LazyLock<Server> = LazyLock::new(|| Server::new(Arc::new(One(Arc::new(RamDisk::new(1 << 20))))));

fuzz_target!(|bytes: &[u8]| {
    let Ok((ours, theirs)) = UnixStream::pair() else { return };
    SERVER.serve_stream(theirs).expect("a connection");
    std::thread::scope(|scope| {
        let writer = &ours;
        scope.spawn(move || {
            let _ = (&*writer).write_all(bytes);
            let _ = writer.shutdown(Shutdown::Write);
        });
        // Whatever it answers, it comes to an end.
        let mut said = [0; 64 << 10];
        while matches!((&ours).read(&mut said), Ok(got) if got > 0) {}
    });
});
