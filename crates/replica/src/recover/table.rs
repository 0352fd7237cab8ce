#![doc = include_str!("../../../../docs/recovery.md")]

/// What the lineage says of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing is under way.
    None,
    /// A commit in place.
    InPlace,
    /// A seed to a new file.
    NewFile,
    /// A clone of which nothing was durable: it may be empty.
    ClonePending,
    /// A commit to a clone.
    Clone,
    /// The seed is complete and durable; only the names are to be changed.
    NewFileFinished,
    /// The same of a clone.
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
    /// The same, but room was reserved in it since, which moved its times.
    Reserved,
    /// The same, taken over and not compared to the end.
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
    /// Nothing that fits, or nothing new.
    Useless,
}

/// What the replica is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    /// [`crate::Options::adopt`]; goes before the other.
    Adopt,
    /// [`crate::Options::doubt`].
    Doubt,
    /// To go on from what it is.
    Use,
}

/// What is known so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Situation {
    pub step: Step,
    pub file: File,
    pub sealed: Sealed,
    pub content: Content,
    pub arriving: Arriving,
    pub asked: Asked,
}

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Fill in [`Situation::sealed`].
    LookAtSealed,
    /// Fill in [`Situation::content`].
    LookAtContent,
    /// Fill in [`Situation::arriving`].
    LookAtArriving,
    /// Remove NAME.partial.
    RemoveStray,
    /// Remove the step's file, if there is one, and take the step out of the lineage.
    DropStep,
    /// Move the lineage: the step's file is at its name.
    FinishRename,
    /// Rename NAME.partial to NAME, and move the lineage.
    PutInPlace,
    /// Remove `journal-whole`.
    DropMerged,
    /// Take over the times that the destination has now.
    TakeTimes,
    /// Remove `journal`.
    DropArriving,
    /// Ends: begin as if there had been no replica, and leave all where it is.
    Forget,
    /// Ends: take what is there as something of which nothing is known.
    Adopt,
    /// Ends: open it all the same, and say that others have changed it.
    OpenInDoubt,
    /// Ends: merge `journal-whole`.
    Merge,
    /// Ends: seal `journal` and merge it; where there is no room, it is useless.
    SealAndMerge,
    /// Ends: the next delta may go on from `journal`.
    KeepArriving,
    /// Ends: there is nothing to do.
    Open,
    /// Ends: refuse.
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
    use Action::*;
    let Situation { step, file, sealed, content, arriving, asked } = *situation;
    let finished = matches!(step, Step::NewFileFinished | Step::CloneFinished);
    let changed = || match asked {
        Asked::Adopt => Adopt,
        Asked::Doubt => OpenInDoubt,
        Asked::Use => Refuse(Refusal::Changed),
    };
    let adopt_or = |refusal| if asked == Asked::Adopt { Adopt } else { Refuse(refusal) };

    // The file of a step, and its names.
    match (step, file) {
        (Step::None | Step::InPlace, File::Stray) => return RemoveStray,
        (Step::None | Step::InPlace, _) => {}
        (Step::ClonePending, _) | (_, File::None | File::Stray) => return DropStep,
        (Step::NewFile | Step::Clone, File::InPlace) => return DropStep,
        (Step::NewFile | Step::Clone, File::Beside) => {}
        (Step::NewFileFinished | Step::CloneFinished, File::InPlace | File::Beside) => {}
    }
    if finished {
        return match (step, file, content) {
            (.., Content::Unseen) => LookAtContent,
            // There is nothing at NAME.partial any more that could be looked at in doubt.
            (_, File::InPlace, Content::Changed) => adopt_or(Refusal::Changed),
            (_, File::InPlace, _) => FinishRename,
            (Step::CloneFinished, _, Content::Changed) => changed(),
            _ => PutInPlace,
        };
    }

    // What may be half merged.
    match (sealed, content) {
        (Sealed::Unseen, _) => return LookAtSealed,
        (Sealed::Merged, _) => return DropMerged,
        (Sealed::Whole | Sealed::Damaged, _) if asked == Asked::Adopt => return Adopt,
        (_, Content::Unseen) => return LookAtContent,
        (_, Content::Unknown) => return adopt_or(Refusal::NotAReplica),
        (Sealed::None, _) | (_, Content::None | Content::Gone) => {}
        (_, Content::Changed) => return Refuse(Refusal::Changed),
        (Sealed::Damaged, _) => return Refuse(Refusal::Damaged),
        (Sealed::Whole, _) => return Merge,
    }

    // What is there, and what has come.
    match (step, content, arriving) {
        (Step::None | Step::InPlace, Content::Gone, _) => Forget,
        (Step::NewFile, Content::None | Content::Gone, _) => by_arriving(arriving),
        (Step::NewFile, ..) if asked == Asked::Adopt => Adopt,
        (Step::NewFile, Content::Changed, _) => Refuse(Refusal::Changed),
        (Step::NewFile, ..) => Open,
        (_, Content::Changed, _) => changed(),
        (_, Content::Reserved, _) => TakeTimes,
        (Step::None | Step::InPlace, Content::AsLeft | Content::Unproven, Arriving::Complete) => SealAndMerge,
        (_, Content::Unproven, Arriving::None | Arriving::Part) if asked != Asked::Adopt => {
            Refuse(Refusal::Unproven)
        }
        _ => by_arriving(arriving),
    }
}

fn by_arriving(arriving: Arriving) -> Action {
    match arriving {
        Arriving::Unseen => Action::LookAtArriving,
        Arriving::None => Action::Open,
        Arriving::Part => Action::KeepArriving,
        Arriving::Complete | Arriving::Useless => Action::DropArriving,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words of the table's cells.
    const STEPS: [(&str, Step); 7] = [
        ("none", Step::None),
        ("in place", Step::InPlace),
        ("new file", Step::NewFile),
        ("clone pending", Step::ClonePending),
        ("clone", Step::Clone),
        ("new file finished", Step::NewFileFinished),
        ("clone finished", Step::CloneFinished),
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
    const ARRIVING: [(&str, Arriving); 5] = [
        ("unseen", Arriving::Unseen),
        ("none", Arriving::None),
        ("part", Arriving::Part),
        ("complete", Arriving::Complete),
        ("useless", Arriving::Useless),
    ];
    const ASKED: [(&str, Asked); 3] = [("adopt", Asked::Adopt), ("doubt", Asked::Doubt), ("use", Asked::Use)];
    const ACTIONS: [(&str, Action); 21] = [
        ("look at `journal-whole`", Action::LookAtSealed),
        ("look at the destination", Action::LookAtContent),
        ("look at `journal`", Action::LookAtArriving),
        ("remove the stray file", Action::RemoveStray),
        ("drop the step", Action::DropStep),
        ("finish the rename", Action::FinishRename),
        ("put the file in place", Action::PutInPlace),
        ("drop `journal-whole`", Action::DropMerged),
        ("take over the times", Action::TakeTimes),
        ("drop `journal`", Action::DropArriving),
        ("forget", Action::Forget),
        ("adopt", Action::Adopt),
        ("open in doubt", Action::OpenInDoubt),
        ("merge `journal-whole`", Action::Merge),
        ("seal and merge `journal`", Action::SealAndMerge),
        ("keep `journal`", Action::KeepArriving),
        ("open", Action::Open),
        ("refuse: changed", Action::Refuse(Refusal::Changed)),
        ("refuse: not a replica", Action::Refuse(Refusal::NotAReplica)),
        ("refuse: damaged", Action::Refuse(Refusal::Damaged)),
        ("refuse: unproven", Action::Refuse(Refusal::Unproven)),
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
        steps: Vec<Step>,
        files: Vec<File>,
        sealed: Vec<Sealed>,
        contents: Vec<Content>,
        arriving: Vec<Arriving>,
        asked: Vec<Asked>,
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
                Action::Merge
                    | Action::SealAndMerge
                    | Action::FinishRename
                    | Action::TakeTimes
                    | Action::KeepArriving
                    | Action::Open
                    | Action::Forget
            );
            assert!(!trusts, "{situation:?}: {action:?}");
            // A new file takes the place of whatever may be replaced.
            let renames = action == Action::PutInPlace && situation.step != Step::NewFileFinished;
            assert!(!renames, "{situation:?}: {action:?}");
        }
    }

    /// Each action that does not end the recovery fills in what was unseen, or takes away what it was decided by.
    #[test]
    fn recovery_ends() {
        for situation in all() {
            let Situation { step, file, sealed, content, arriving, .. } = situation;
            let had = match decide(&situation) {
                Action::LookAtSealed => sealed == Sealed::Unseen,
                Action::LookAtContent => content == Content::Unseen,
                Action::LookAtArriving => arriving == Arriving::Unseen,
                Action::RemoveStray => file == File::Stray,
                Action::DropStep | Action::FinishRename | Action::PutInPlace => {
                    !matches!(step, Step::None | Step::InPlace)
                }
                Action::DropMerged => sealed == Sealed::Merged,
                Action::TakeTimes => content == Content::Reserved,
                Action::DropArriving => matches!(arriving, Arriving::Complete | Arriving::Useless),
                Action::Forget
                | Action::Adopt
                | Action::OpenInDoubt
                | Action::Merge
                | Action::SealAndMerge
                | Action::KeepArriving
                | Action::Open
                | Action::Refuse(_) => true,
            };
            assert!(had, "{situation:?}: {:?}", decide(&situation));
        }
    }
}
