//! The words of a command line: sizes, times, rates, addresses.

pub(crate) mod address;
pub(crate) mod bandwidth;
pub(crate) mod change_list;
pub(crate) mod machine_name;
pub(crate) mod units;
