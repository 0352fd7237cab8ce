#![doc = include_str!("../../../../docs/recovery.md")]

/// How far a step has come, as the lineage records it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing is under way.
    None,
    /// A commit in place.
    InPlace,
    /// A seed to a new file.
    NewFile,
    /// A clone that is not gone on from: nothing of it was durable, or the past is kept.
    ClonePending,
    /// A commit to a clone.
    Clone,
    /// The seed is complete and durable; only the names are to be changed.
    NewFileFinished,
    /// The clone is complete and durable; only the names are to be changed.
    CloneFinished,
}

/// Where the file is that a step writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum File {
    /// Nowhere, or there is no such step.
    None,
    /// No step knows of NAME.partial, which is empty.
    Stray,
    /// At NAME.partial.
    Beside,
    /// At NAME.
    InPlace,
}

/// What `journal-whole` holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sealed {
    /// Not looked at yet.
    Unseen,
    /// There is no such file, or nothing that it could be merged into.
    None,
    /// It ends with the last commit.
    Merged,
    /// Whole deltas that may be half merged.
    Whole,
    /// No whole delta.
    Damaged,
}

/// What is at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// Not looked at yet.
    Unseen,
    /// Nothing, as the lineage says.
    None,
    /// Nothing, where the lineage knows of something.
    Gone,
    /// Something of which the lineage does not know.
    Unknown,
    /// What dsync left.
    AsLeft,
    /// What dsync left, but room was reserved in it since, or others changed its attributes alone, which moved its times.
    Reserved,
    /// What dsync left, taken over and not compared to the end.
    Unproven,
    /// Something else, or what others may have written to.
    Changed,
}

/// What `journal` holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arriving {
    /// Not looked at yet.
    Unseen,
    /// There is no such file.
    None,
    /// A part of a delta that fits.
    Part,
    /// A whole delta that fits.
    Complete,
    /// A whole delta that fits, with room for what it writes.
    HasRoom,
    /// A whole delta that its group has committed: there was room for what it writes.
    Committed,
    /// Nothing that fits, or nothing new.
    Useless,
}

/// What the replica is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// [`crate::ReplicaOptions::adopt`]; goes before the other.
    Adopt,
    /// [`crate::ReplicaOptions::doubt`].
    Doubt,
    /// To go on from what it is.
    Use,
}

/// What is known so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Situation {
    pub step: Stage,
    pub file: File,
    pub sealed: Sealed,
    pub content: Content,
    pub arriving: Arriving,
    pub asked: Purpose,
}

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Fill in a column.
    Look(Column),
    /// Change something, then decide again.
    Change(Repair),
    /// The last action.
    End(End),
}

/// A column that is looked at only when a line asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Column {
    /// [`Situation::sealed`].
    Sealed,
    /// [`Situation::content`].
    Content,
    /// [`Situation::arriving`].
    Arriving,
}

/// A change that is made before the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repair {
    /// Remove NAME.partial.
    RemoveStray,
    /// Remove the step's file, if there is one, and take the step out of the lineage.
    DropStep,
    /// Move the lineage: the step's file is at its name.
    FinishRename,
    /// Move the lineage with all of it marked as unsure: the step's file is at its name.
    FinishInDoubt,
    /// Rename NAME.partial to NAME, and move the lineage.
    PutInPlace,
    /// Remove `journal-whole`.
    DropMerged,
    /// Mark all of the destination as unsure, then remove `journal-whole`.
    GiveUpSealed,
    /// Take over the times that the destination has now.
    TakeTimes,
    /// Reserve room for what `journal` writes.
    MakeRoom,
    /// Remove `journal`.
    DropArriving,
}

/// How recovery ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// Begin as if there had been no replica, and leave all where it is.
    Forget,
    /// Take what is there as something of which nothing is known.
    Adopt,
    /// Open it all the same, and say that others have changed it.
    OpenInDoubt,
    /// Merge `journal-whole`.
    Merge,
    /// Seal `journal` and merge it.
    SealAndMerge,
    /// The next delta may go on from `journal`.
    KeepArriving,
    /// There is nothing to do.
    Open,
    /// Not opened.
    Refuse(Refusal),
}

/// Why a replica is not opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Others have changed it.
    Changed,
    /// What is there is not a replica.
    NotAReplica,
    /// `journal-whole` is damaged.
    Damaged,
    /// It was adopted and not compared to the end.
    Unproven,
}

/// The table.
pub(super) fn decide(situation: &Situation) -> Action {
    let Situation { step, file, sealed, content, arriving, asked } = *situation;
    let finished = matches!(step, Stage::NewFileFinished | Stage::CloneFinished);
    let refuse = |refusal| Action::End(End::Refuse(refusal));
    let adopt_or = |other| Action::End(if asked == Purpose::Adopt { End::Adopt } else { other });
    let changed = || match asked {
        Purpose::Doubt => Action::End(End::OpenInDoubt),
        Purpose::Adopt | Purpose::Use => adopt_or(End::Refuse(Refusal::Changed)),
    };

    // The file of a step, and its names.
    match (step, file) {
        (Stage::None | Stage::InPlace, File::Stray) => return Action::Change(Repair::RemoveStray),
        (Stage::None | Stage::InPlace, _) => {}
        (Stage::ClonePending, _) | (_, File::None | File::Stray) => return Action::Change(Repair::DropStep),
        (Stage::NewFile | Stage::Clone, File::InPlace) => return Action::Change(Repair::DropStep),
        (Stage::NewFile | Stage::Clone, File::Beside) => {}
        (Stage::NewFileFinished | Stage::CloneFinished, File::InPlace | File::Beside) => {}
    }
    if finished {
        return match (step, file, content) {
            (.., Content::Unseen) => Action::Look(Column::Content),
            // There is nothing at NAME.partial any more that could be looked at.
            (_, File::InPlace, Content::Changed) if asked == Purpose::Doubt => {
                Action::Change(Repair::FinishInDoubt)
            }
            (_, File::InPlace, Content::Changed) => adopt_or(End::Refuse(Refusal::Changed)),
            (_, File::InPlace, _) => Action::Change(Repair::FinishRename),
            // Another file has got its name first.
            (Stage::NewFileFinished, _, Content::Unknown) => adopt_or(End::Refuse(Refusal::NotAReplica)),
            (Stage::CloneFinished, _, Content::Changed) => changed(),
            _ => Action::Change(Repair::PutInPlace),
        };
    }

    // What may be half merged.
    match (sealed, content) {
        (Sealed::Unseen, _) => return Action::Look(Column::Sealed),
        (Sealed::Merged, _) => return Action::Change(Repair::DropMerged),
        (Sealed::Whole | Sealed::Damaged, _) if asked == Purpose::Adopt => return Action::End(End::Adopt),
        (_, Content::Unseen) => return Action::Look(Column::Content),
        (_, Content::Unknown) => return adopt_or(End::Refuse(Refusal::NotAReplica)),
        (Sealed::None, _) | (_, Content::None | Content::Gone) => {}
        // A merge would overwrite what others wrote before anybody has seen it.
        (_, Content::Changed) if asked == Purpose::Doubt => return Action::Change(Repair::GiveUpSealed),
        (_, Content::Changed) => return refuse(Refusal::Changed),
        (Sealed::Damaged, _) => return refuse(Refusal::Damaged),
        (Sealed::Whole, _) => return Action::End(End::Merge),
    }

    // What is there, and what has come.
    match (step, content, arriving) {
        (Stage::None | Stage::InPlace, Content::Gone, _) => Action::End(End::Forget),
        (Stage::NewFile, Content::None | Content::Gone, _) => by_arriving(arriving),
        (Stage::NewFile, ..) if asked == Purpose::Adopt => Action::End(End::Adopt),
        (Stage::NewFile, Content::Changed, _) => refuse(Refusal::Changed),
        (Stage::NewFile, ..) => Action::End(End::Open),
        (_, Content::Changed, _) => changed(),
        (_, Content::Reserved, _) => Action::Change(Repair::TakeTimes),
        (Stage::None | Stage::InPlace, Content::AsLeft | Content::Unproven, Arriving::Complete) => {
            Action::Change(Repair::MakeRoom)
        }
        (
            Stage::None | Stage::InPlace,
            Content::AsLeft | Content::Unproven,
            Arriving::HasRoom | Arriving::Committed,
        ) => Action::End(End::SealAndMerge),
        (_, Content::Unproven, Arriving::None | Arriving::Part) if asked != Purpose::Adopt => {
            refuse(Refusal::Unproven)
        }
        _ => by_arriving(arriving),
    }
}

fn by_arriving(arriving: Arriving) -> Action {
    match arriving {
        Arriving::Unseen => Action::Look(Column::Arriving),
        Arriving::None => Action::End(End::Open),
        Arriving::Part => Action::End(End::KeepArriving),
        Arriving::Complete | Arriving::HasRoom | Arriving::Committed | Arriving::Useless => {
            Action::Change(Repair::DropArriving)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words of the table's cells.
    const STEPS: [(&str, Stage); 7] = [
        ("none", Stage::None),
        ("in place", Stage::InPlace),
        ("new file", Stage::NewFile),
        ("clone pending", Stage::ClonePending),
        ("clone", Stage::Clone),
        ("new file finished", Stage::NewFileFinished),
        ("clone finished", Stage::CloneFinished),
    ];
    const FILES: [(&str, File); 4] =
        [("none", File::None), ("stray", File::Stray), ("beside", File::Beside), ("in place", File::InPlace)];
    const SEALED: [(&str, Sealed); 5] = [
        ("unseen", Sealed::Unseen),
        ("none", Sealed::None),
        ("merged", Sealed::Merged),
        ("whole", Sealed::Whole),
        ("damaged", Sealed::Damaged),
    ];
    const CONTENTS: [(&str, Content); 8] = [
        ("unseen", Content::Unseen),
        ("none", Content::None),
        ("gone", Content::Gone),
        ("unknown", Content::Unknown),
        ("as left", Content::AsLeft),
        ("reserved", Content::Reserved),
        ("unproven", Content::Unproven),
        ("changed", Content::Changed),
    ];
    const ARRIVING: [(&str, Arriving); 7] = [
        ("unseen", Arriving::Unseen),
        ("none", Arriving::None),
        ("part", Arriving::Part),
        ("complete", Arriving::Complete),
        ("has room", Arriving::HasRoom),
        ("committed", Arriving::Committed),
        ("useless", Arriving::Useless),
    ];
    const ASKED: [(&str, Purpose); 3] =
        [("adopt", Purpose::Adopt), ("doubt", Purpose::Doubt), ("use", Purpose::Use)];
    const ACTIONS: [(&str, Action); 24] = [
        ("look at `journal-whole`", Action::Look(Column::Sealed)),
        ("look at the destination", Action::Look(Column::Content)),
        ("look at `journal`", Action::Look(Column::Arriving)),
        ("remove the stray file", Action::Change(Repair::RemoveStray)),
        ("drop the step", Action::Change(Repair::DropStep)),
        ("finish the rename", Action::Change(Repair::FinishRename)),
        ("finish the rename in doubt", Action::Change(Repair::FinishInDoubt)),
        ("put the file in place", Action::Change(Repair::PutInPlace)),
        ("drop `journal-whole`", Action::Change(Repair::DropMerged)),
        ("give up `journal-whole`", Action::Change(Repair::GiveUpSealed)),
        ("take over the times", Action::Change(Repair::TakeTimes)),
        ("make room", Action::Change(Repair::MakeRoom)),
        ("drop `journal`", Action::Change(Repair::DropArriving)),
        ("**forget**", Action::End(End::Forget)),
        ("**adopt**", Action::End(End::Adopt)),
        ("**open in doubt**", Action::End(End::OpenInDoubt)),
        ("**merge `journal-whole`**", Action::End(End::Merge)),
        ("**seal and merge `journal`**", Action::End(End::SealAndMerge)),
        ("**keep `journal`**", Action::End(End::KeepArriving)),
        ("**open**", Action::End(End::Open)),
        ("**refuse: changed**", Action::End(End::Refuse(Refusal::Changed))),
        ("**refuse: not a replica**", Action::End(End::Refuse(Refusal::NotAReplica))),
        ("**refuse: damaged**", Action::End(End::Refuse(Refusal::Damaged))),
        ("**refuse: unproven**", Action::End(End::Refuse(Refusal::Unproven))),
    ];

    /// The values that a cell names; all of them if it is empty.
    fn values<T: Copy>(cell: &str, words: &[(&str, T)]) -> Vec<T> {
        let named = |word: &str| {
            let found = words.iter().find(|(known, _)| *known == word);
            found.unwrap_or_else(|| panic!("\"{word}\" is not a word of the table")).1
        };
        match cell {
            "" => words.iter().map(|(_, value)| *value).collect(),
            cell => cell.split(", ").map(named).collect(),
        }
    }

    struct Line {
        text: &'static str,
        steps: Vec<Stage>,
        files: Vec<File>,
        sealed: Vec<Sealed>,
        contents: Vec<Content>,
        arriving: Vec<Arriving>,
        asked: Vec<Purpose>,
        action: Action,
    }

    impl Line {
        fn fits(&self, s: &Situation) -> bool {
            self.steps.contains(&s.step)
                && self.files.contains(&s.file)
                && self.sealed.contains(&s.sealed)
                && self.contents.contains(&s.content)
                && self.arriving.contains(&s.arriving)
                && self.asked.contains(&s.asked)
        }
    }

    fn documented() -> Vec<Line> {
        let page = include_str!("../../../../docs/recovery.md");
        let line = |text: &'static str| {
            let cells: Vec<&str> = text.trim_matches('|').split('|').map(str::trim).collect();
            let [step, file, sealed, content, arriving, asked, action] = cells[..] else {
                panic!("not seven columns: {text}")
            };
            Line {
                text,
                steps: values(step, &STEPS),
                files: values(file, &FILES),
                sealed: values(sealed, &SEALED),
                contents: values(content, &CONTENTS),
                arriving: values(arriving, &ARRIVING),
                asked: values(asked, &ASKED),
                action: values(action, &ACTIONS)[0],
            }
        };
        // Behind the head and the rule below it.
        page.lines().filter(|line| line.starts_with('|')).skip(2).map(line).collect()
    }

    fn all() -> impl Iterator<Item = Situation> {
        let mut all = Vec::new();
        for (_, step) in STEPS {
            for (_, file) in FILES {
                for (_, sealed) in SEALED {
                    for (_, content) in CONTENTS {
                        for (_, arriving) in ARRIVING {
                            for (_, asked) in ASKED {
                                all.push(Situation { step, file, sealed, content, arriving, asked });
                            }
                        }
                    }
                }
            }
        }
        all.into_iter()
    }

    #[test]
    fn every_situation_is_decided_by_the_documented_line() {
        let lines = documented();
        let mut used = vec![0; lines.len()];
        for situation in all() {
            let first = lines.iter().position(|line| line.fits(&situation));
            let first = first.unwrap_or_else(|| panic!("no line fits {situation:?}"));
            used[first] += 1;
            assert_eq!(decide(&situation), lines[first].action, "{situation:?}: {}", lines[first].text);
        }
        for (line, count) in lines.iter().zip(used) {
            assert!(count > 0, "never the first that fits: {}", line.text);
        }
        for (word, action) in ACTIONS {
            assert!(lines.iter().any(|line| line.action == action), "no line leads to \"{word}\"");
        }
    }

    /// What is merged over, or opened without a word, was not changed by others.
    #[test]
    fn nothing_is_merged_over_what_others_wrote() {
        for situation in all().filter(|s| s.content == Content::Changed) {
            let action = decide(&situation);
            let trusts = matches!(
                action,
                Action::End(End::Merge | End::SealAndMerge | End::KeepArriving | End::Open | End::Forget)
                    | Action::Change(Repair::FinishRename | Repair::TakeTimes | Repair::MakeRoom)
            );
            assert!(!trusts, "{situation:?}: {action:?}");
            // A new file takes the place of whatever may be replaced.
            let renames = action == Action::Change(Repair::PutInPlace);
            assert!(!renames || situation.step == Stage::NewFileFinished, "{situation:?}: {action:?}");
        }
    }

    /// Each action that does not end the recovery fills in what was unseen, or takes away what it was decided by.
    #[test]
    fn recovery_ends() {
        for situation in all() {
            let Situation { step, file, sealed, content, arriving, .. } = situation;
            let had = match decide(&situation) {
                Action::Look(Column::Sealed) => sealed == Sealed::Unseen,
                Action::Look(Column::Content) => content == Content::Unseen,
                Action::Look(Column::Arriving) => arriving == Arriving::Unseen,
                Action::Change(Repair::RemoveStray) => file == File::Stray,
                Action::Change(
                    Repair::DropStep | Repair::FinishRename | Repair::FinishInDoubt | Repair::PutInPlace,
                ) => !matches!(step, Stage::None | Stage::InPlace),
                Action::Change(Repair::GiveUpSealed) => matches!(sealed, Sealed::Whole | Sealed::Damaged),
                Action::Change(Repair::DropMerged) => sealed == Sealed::Merged,
                Action::Change(Repair::TakeTimes) => content == Content::Reserved,
                Action::Change(Repair::MakeRoom) => arriving == Arriving::Complete,
                Action::Change(Repair::DropArriving) => {
                    !matches!(arriving, Arriving::Unseen | Arriving::None | Arriving::Part)
                }
                Action::End(_) => true,
            };
            assert!(had, "{situation:?}: {:?}", decide(&situation));
        }
    }
}
