// ScatterRows for CANN: tiling, shapes, definition.
#include "scatter_rows_tiling.h"
#include "rows_cann.h"

namespace optiling {

static ge::graphStatus ScatterRowsTilingFunc(gert::TilingContext* context) {
  const gert::Shape& x = turbogr::InputShape(context, 0);
  const int64_t* count = context->GetAttrs()->GetInt(0);
  const turbogr::ScatterRowsProblem problem = {
      x.GetDim(0), *count, turbogr::Width(x, 1), turbogr::InputBytes(context, 0), turbogr::InputBytes(context, 1),
      turbogr::VectorCores(context)};
  if (!turbogr::RowScatterTakes(problem.entries, problem.count, problem.width, problem.bytes)) {
    return ge::GRAPH_FAILED;
  }
  return turbogr::SetLaunch<turbogr::ScatterRowsTiling>(context, problem);
}

}  // namespace optiling

namespace ge {

static graphStatus ScatterRowsInferShape(gert::InferShapeContext* context) {
  const gert::Shape* x = context->GetInputShape(0);
  gert::Shape* y = context->GetOutputShape(0);
  *y = *x;
  y->SetDim(0, *context->GetAttrs()->GetInt(0));
  return ge::GRAPH_SUCCESS;
}

static graphStatus ScatterRowsInferDataType(gert::InferDataTypeContext* context) {
  return context->SetOutputDataType(0, context->GetInputDataType(0));
}

}  // namespace ge

namespace ops {

class ScatterRows : public OpDef {
 public:
  explicit ScatterRows(const char* name) : OpDef(name) {
    this->Input("x")
        .ParamType(REQUIRED)
        .DataType({ge::DT_FLOAT16, ge::DT_FLOAT16, ge::DT_BF16, ge::DT_BF16, ge::DT_FLOAT, ge::DT_FLOAT})
        .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
    this->Input("rows")
        .ParamType(REQUIRED)
        .DataType({ge::DT_INT32, ge::DT_INT64, ge::DT_INT32, ge::DT_INT64, ge::DT_INT32, ge::DT_INT64})
        .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
    this->Output("y")
        .ParamType(REQUIRED)
        .DataType({ge::DT_FLOAT16, ge::DT_FLOAT16, ge::DT_BF16, ge::DT_BF16, ge::DT_FLOAT, ge::DT_FLOAT})
        .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
    this->Attr("count").AttrType(REQUIRED).Int();
    this->SetInferShape(ge::ScatterRowsInferShape);
    this->SetInferDataType(ge::ScatterRowsInferDataType);
    this->AICore().SetTiling(optiling::ScatterRowsTilingFunc);
    this->AICore().AddConfig("ascend910b");
    this->AICore().AddConfig("ascend910_93");
  }
};

OP_ADD(ScatterRows);

}  // namespace ops
