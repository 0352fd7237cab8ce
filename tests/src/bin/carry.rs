//! See [`dsync_tests::carry`].

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    if let Err(error) = dsync_tests::carry::run(&words) {
        eprintln!("carry: {error}");
        std::process::exit(1);
    }
}
