//! Before a destination is adopted: whether it is a copy of the source at all.

use compare::{Finding, Held, Scope};
use delta::Method;
use source::Handle;

use crate::compared::Comparison;
use crate::conflict::Conflict;
use crate::error::SyncError;
use crate::messages::{PLAN, Plan, Status};
use crate::options::Unreadable;
use crate::plan::Choice;
use crate::transfer::Transfer;

impl Transfer<'_> {
    /// Refuses to adopt a destination of whose data the larger part differs from the source. It is compared before the checkpoint, so that
    /// a refusal leaves both as they were, however what differs is found and committed later.
    pub(crate) fn refuse_unlike(
        &self,
        handle: &Handle,
        choice: &Choice,
        status: &Status,
    ) -> Result<(), SyncError> {
        let options = self.options;
        let compares = matches!(choice.method, Method::Compare | Method::Rolling);
        if !options.adopt || options.overwrite || !compares {
            return Ok(());
        }
        let (disk, about) = (handle.reader()?, handle.about());
        let scope = Scope {
            hash: options.hash,
            keep_going: options.unreadable >= Unreadable::SendAnew,
            ..Scope::whole(disk.len(), about.block_size)
        };
        let (compare, member) = (Some(scope.clone()), self.member.0);
        self.sender.send_json(PLAN, &Plan { compare, looks_first: true, member, ..Plan::default() })?;
        let totals = &self.totals;
        let comparison =
            Comparison { receiver: self.receiver, disk, view: None, scope: &scope, fill: false, totals };
        let mut all = Held::default();
        comparison.run(|finding| {
            if let Finding::Held(held) = finding {
                all.add(held);
            }
            Ok(())
        })?;
        Status::hear(self.receiver)?;
        let Held { bytes: held, differing } = all;
        if differing <= held / 2 {
            return Ok(());
        }
        let (replica, path) = (status.path.clone(), about.path.clone());
        Err(Conflict::Unlike { replica, held, differing, path }.into())
    }
}
