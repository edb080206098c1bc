"""A tree drafted by a model, computed on the device alone: level by level, a forward of all its tokens each.

Shape legend: R rows (padding included), F tokens of a level that others follow, W candidates after each, N = F·W
candidates of a level, A candidates of all levels, M followed tokens of all levels, G tokens of a tree, D tokens on the
path to a place, C hidden width, V vocabulary.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fly.backends.cuda.attention import Branches
from fly.backends.cuda.chain import Proposal
from fly.backends.cuda.feed import Feed
from fly.backends.cuda.graphs import Captures, Part
from fly.backends.cuda.says import Says
from fly.backends.cuda.shape import Column
from fly.executor import Growth
from fly.ops import top

__all__ = ["Grown"]


class Grown:
    """Trees for the rows of a ``Table``, as ``fly.drafts.TreeDraft`` grows them: all levels are one graph. A row's
    ``Column.K`` is the number of its levels."""

    def __init__(self, feed: Feed, says: Says | None, growth: Growth, captures: Captures) -> None:
        self.feed, self.table, self.says, self.growth = feed, feed.table, says, growth
        self.run = Part(self._run, captures)

    def _run(self) -> Proposal:
        feed, device = self.feed, self.table.device
        length_R, levels_R = feed.places(self.table.column(Column.LENGTH)), self.table.column(Column.K)
        going_R = levels_R > 0
        new_RN, stored_RN = feed.last(going_R)
        hidden_RFC = feed.forward(new_RN, length_R - new_RN.shape[1], stored_RN)[:, -1:]
        logits_RFV = feed.logits(hidden_RFC)
        path_RFD = new_RN.new_zeros(len(length_R), 1, 0)
        if self.says is not None:
            self.says.begin(self.table)
        # The places that the candidates of a level follow: what the path there scores (-inf where there is none, and
        # so everything after it), its number among all candidates (-1 is the row itself), and what it sees.
        score_RF = torch.zeros(len(length_R), 1, dtype=torch.float64, device=device)
        score_RF = score_RF.masked_fill(~going_R.unsqueeze(1), -torch.inf)
        node_RF = torch.full_like(score_RF, -1, dtype=torch.int64)
        widths = [min(width, logits_RFV.shape[2]) for width in self.growth.widths]
        counts = list(itertools.accumulate(widths[:-1], lambda n, width: min(n * width, self.growth.follow), initial=1))
        own_MM = torch.eye(sum(counts[1:]), dtype=torch.bool, device=device)
        sees_RFM = own_MM.new_zeros(len(length_R), 1, len(own_MM))
        tokens, parents, scores = list[Tensor](), list[Tensor](), list[Tensor]()
        candidates = fed = 0
        for level, (width, count) in enumerate(zip(widths, counts)):
            if level:
                open_RN = scores[-1].masked_fill(self._ends(tokens[-1]), -torch.inf)  # nothing follows an end
                best = open_RN.sort(dim=1, descending=True, stable=True)
                score_RF, at_RF = best.values[:, :count], best.indices[:, :count]
                token_RF, node_RF = tokens[-1].gather(1, at_RF), candidates - open_RN.shape[1] + at_RF
                parent_RF1 = (at_RF // widths[level - 1]).unsqueeze(2)
                sees_RFM = sees_RFM.gather(1, parent_RF1.expand(-1, -1, len(own_MM))) | own_MM[fed : fed + count]
                before_RFC = hidden_RFC.gather(1, parent_RF1.expand(-1, -1, hidden_RFC.shape[2]))
                at_R = length_R + level - 1
                branches = Branches(length_R, sees_RFM, at_R.unsqueeze(1).expand(-1, count))
                there_RF = score_RF > -torch.inf
                path_RFD = path_RFD.gather(1, parent_RF1.expand(-1, -1, level - 1))
                path_RFD = torch.cat([path_RFD, token_RF.unsqueeze(2)], 2)
                hidden_RFC = feed.forward(token_RF, length_R + fed, there_RF, before_RFC, branches)
                logits_RFV = feed.logits(hidden_RFC)
                fed += count
            if self.says is not None:
                logits_RFV = self.says.on(logits_RFV, self.table, 0, not level, path_RFD)
            log_RFV = logits_RFV.log_softmax(-1)
            if self.says is not None:  # where everything is banned nothing follows
                log_RFV = log_RFV.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
            found = top(log_RFV, width)
            score_RFW = score_RF.unsqueeze(2) + found.values.double()
            scores.append(score_RFW.masked_fill((levels_R <= level).view(-1, 1, 1), -torch.inf).flatten(1))
            tokens.append(found.indices.flatten(1))
            parents.append(node_RF.unsqueeze(2).expand(-1, -1, width).flatten(1))
            candidates += count * width
        return self._best(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1))

    def _ends(self, tokens_RN: Tensor) -> Tensor:
        """[R, N] bool, tokens that end their row."""
        return (tokens_RN.unsqueeze(2) == self.table.state_RC[:, Column.STOPS :].unsqueeze(1)).any(2)

    def _best(self, tokens_RA: Tensor, parents_RA: Tensor, scores_RA: Tensor) -> Proposal:
        """The likeliest candidates, in the order in which they were found."""
        most, all_ = min(self.growth.nodes, tokens_RA.shape[1]), tokens_RA.shape[1]
        chosen_RG = scores_RA.sort(dim=1, descending=True, stable=True).indices[:, :most]
        there_RG = scores_RA.gather(1, chosen_RG) > -torch.inf
        chosen_RG = torch.where(there_RG, chosen_RG, all_).sort(1).values
        number_RG = torch.arange(most, device=chosen_RG.device).expand_as(chosen_RG)
        number_RA = torch.zeros_like(tokens_RA[:, :1]).repeat(1, all_ + 1).scatter(1, chosen_RG, number_RG)
        chosen_RG = chosen_RG.clamp_max(all_ - 1)
        parents_RG = parents_RA.gather(1, chosen_RG)
        numbers_RG = number_RA.gather(1, parents_RG.clamp_min(0))
        parents_RG = torch.where(parents_RG < 0, -1, numbers_RG)
        return Proposal(tokens_RA.gather(1, chosen_RG), there_RG.sum(1), parents_RK=parents_RG)
