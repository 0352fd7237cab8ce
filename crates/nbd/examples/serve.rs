//! Serves one file on a Unix socket, to try the server and to measure it: `serve [--direct] SOCKET FILE`.
//! Ends, cleanly, at the end of its standard input.

use std::error::Error;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nbd::{Export, ExportInfo, ExportRefusal, Exports, Server};

struct OneFile(Arc<dyn device::Disk>, String);

impl Exports for OneFile {
    fn list(&self) -> Vec<ExportInfo> {
        vec![ExportInfo { name: self.1.clone(), description: "a file".into() }]
    }

    fn open(&self, name: &str) -> Result<Export, ExportRefusal> {
        if name != self.1 {
            return Err(ExportRefusal::unknown(format!(
                "there is no export {name}: the only one is {}",
                self.1
            )));
        }
        Ok(Export { description: "a file".into(), ..Export::new(name, self.0.clone()) })
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let direct = args.first().is_some_and(|arg| arg == Path::new("--direct"));
    let [socket, file] = &args.split_off(direct.into())[..] else {
        return Err("usage: serve [--direct] SOCKET FILE".into());
    };
    let disk = device::open(file, &device::DiskOptions { write: true, direct, ..Default::default() })?;
    let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let server = Server::new(Arc::new(OneFile(disk, name)));
    server.serve_unix(UnixListener::bind(socket)?)?;
    io::copy(&mut io::stdin(), &mut io::sink())?;
    server.shutdown(Duration::from_secs(5));
    std::fs::remove_file(socket)?;
    Ok(())
}
