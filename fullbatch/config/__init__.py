"""What a method is made of: frozen descriptions of every choice on every axis, with their defaults and checks.

An objective is pairwise x normalizer x temperature (plus a scale).  The classes here only describe; the code that acts
on them lives in ``fullbatch.objective``.  Field names are the keyword settings of ``make_objective``.
"""

from fullbatch.config.methods import Method as Method
from fullbatch.config.methods import Scale as Scale
from fullbatch.config.methods import excluded_because as excluded_because
from fullbatch.config.normalizer import Amortized as Amortized
from fullbatch.config.normalizer import BatchAndQueue as BatchAndQueue
from fullbatch.config.normalizer import BatchMean as BatchMean
from fullbatch.config.normalizer import Mlp as Mlp
from fullbatch.config.normalizer import MovingAverage as MovingAverage
from fullbatch.config.normalizer import NoNormalizer as NoNormalizer
from fullbatch.config.normalizer import Normalizer as Normalizer
from fullbatch.config.normalizer import Prototypes as Prototypes
from fullbatch.config.normalizer import Rolling as Rolling
from fullbatch.config.normalizer import Scent as Scent
from fullbatch.config.pairwise import CycleConsistency as CycleConsistency
from fullbatch.config.pairwise import Identity as Identity
from fullbatch.config.pairwise import Pairwise as Pairwise
from fullbatch.config.pairwise import RawSimilarity as RawSimilarity
from fullbatch.config.pairwise import RobustPositives as RobustPositives
from fullbatch.config.pairwise import Sigmoid as Sigmoid
from fullbatch.config.pairwise import SquaredHinge as SquaredHinge
from fullbatch.config.pairwise import VarianceCovariance as VarianceCovariance
from fullbatch.config.temperature import Constant as Constant
from fullbatch.config.temperature import LearnedScale as LearnedScale
from fullbatch.config.temperature import PerSample as PerSample
from fullbatch.config.temperature import Predicted as Predicted
from fullbatch.config.temperature import RobustGlobal as RobustGlobal
from fullbatch.config.temperature import Temperature as Temperature
from fullbatch.config.temperature import rho_of_direction as rho_of_direction
from fullbatch.config.temperature import temperature_bounds as temperature_bounds
